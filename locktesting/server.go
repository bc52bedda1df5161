package locktesting

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/memory"
)

// A server implements [hold.Backend]. It is at once the server that has the leases and the part
// of a Locker that renews them. The locks in memory say which requests are granted; the server
// adds that leases expire, and does what a Control says.
//
// Lock order: server.renewal, Hold.mu, then server.mu, then those of the locks in memory. A hold that its caller
// does not have yet is locked under server.mu, as package memory does.
type server struct {
	*memory.Locks
	host   hold.Host
	config memory.Lease

	renewal sync.Mutex // held from a renewal until its hold knows of it; before all others

	living   context.Context // ends with Close: then nothing is renewed
	end      context.CancelFunc
	renewing batcher.Background

	mu       sync.Mutex
	delay    time.Duration
	refusals map[string][]error // by key
	leases   map[*hold.Hold]*lease
}

// A lease is what the server has of a hold.
type lease struct {
	until   time.Duration // on the Host's clock
	expiry  *time.Timer
	renewal *time.Timer // nil: the caller does not have the lock yet
	failing bool        // renewals fail
}

func newServer(host hold.Host, config memory.Lease) *server {
	s := &server{
		Locks: memory.New(host.Clock, host.Queue), host: host, config: config,
		refusals: make(map[string][]error), leases: make(map[*hold.Hold]*lease),
	}
	s.living, s.end = context.WithCancel(context.Background())
	return s
}

// answer returns when the server answers a request: after the delay, or with an error after
// patience, or when ctx or closing has ended before.
func (s *server) answer(ctx context.Context, patience time.Duration, closing <-chan struct{}) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.mu.Lock()
	delay := s.delay
	s.mu.Unlock()
	if delay == 0 {
		return nil
	}
	closed, ended := clock.Rest(ctx, min(delay, patience), closing)
	switch {
	case ended:
		return context.Cause(ctx)
	case closed:
		return lockerr.ErrClosed
	case delay > patience:
		return lockerr.ErrNoAnswer
	}
	return nil
}

// Try implements [hold.Backend].
func (s *server) Try(ctx context.Context, r hold.Request, attempts []hold.Attempt) {
	sent := s.host.Clock()
	patience := 2 * dbconn.Timeout // as a lease, a request without an answer is sent twice
	if r.Turn.SkipQueue {
		patience = dbconn.Timeout
	}
	if err := s.answer(ctx, patience, s.host.Closing.Done()); err != nil {
		for i := range attempts {
			attempts[i].Err = err
		}
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	group := 1
	if r.Permits > 0 {
		group = len(attempts)
	}
	for each := range slices.Chunk(attempts, group) {
		s.tryLocked(r, each, sent)
	}
}

// tryLocked answers one attempt, or those for permits that are wanted together. It does not pass on the
// caller's context, which may be that of another lock with a mutex of its own.
func (s *server) tryLocked(r hold.Request, attempts []hold.Attempt, sent time.Duration) {
	key, holder := attempts[0].Hold.Key, s.config.Owner+":"+rand.Text()
	if refusals := s.refusals[key]; len(refusals) > 0 {
		for i := range attempts {
			attempts[i].Err = refusals[0]
		}
		s.refusals[key] = refusals[1:]
		return
	}
	for i := range attempts {
		h := attempts[i].Hold
		h.Holder, h.TTL, h.Margin = holder, r.TTL, s.margin(r.TTL)
	}
	s.Locks.Try(context.Background(), r, attempts)
	if busy, ok := errors.AsType[*hold.Busy](attempts[0].Err); ok {
		busy.Remaining = s.remainingLocked(busy.Holder)
		return
	}
	for i := range attempts {
		if h := attempts[i].Hold; !s.grantedLocked(h, sent) {
			_ = s.Locks.Release(h)
			attempts[i].Err = hold.ErrLateGrant
		}
	}
}

// grantedLocked makes the lease of a hold that has its key, unless the answer is late.
func (s *server) grantedLocked(h *hold.Hold, sent time.Duration) bool {
	now := s.host.Clock()
	if !h.Granted(h.Token, sent, now) {
		return false
	}
	l := &lease{until: now + h.TTL}
	l.expiry = time.AfterFunc(h.TTL, func() { s.expired(h, l) })
	s.leases[h] = l
	return true
}

// margin returns by how much the deadline of a hold is earlier than the end of its lease.
func (s *server) margin(ttl time.Duration) time.Duration {
	return max(time.Duration(float64(s.config.Margin)*float64(ttl)/float64(s.config.TTL)), 100*time.Millisecond)
}

// remainingLocked returns how long the lease of a holder lasts; 0: it is another process.
func (s *server) remainingLocked(holder string) time.Duration {
	for h, l := range s.leases {
		if h.Holder == holder {
			return l.until - s.host.Clock()
		}
	}
	return 0
}

// expired removes a lease whose TTL is over, unless it was renewed just now.
func (s *server) expired(h *hold.Hold, l *lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leases[h] == l && s.host.Clock() >= l.until {
		s.freeLocked(h)
	}
}

// freeLocked removes a lease, and wakes the first waiter.
func (s *server) freeLocked(h *hold.Hold) {
	l := s.leases[h]
	if l == nil {
		return
	}
	delete(s.leases, h)
	l.stopLocked()
	_ = s.Locks.Release(h)
}

// stopLocked stops the timers of a lease.
func (l *lease) stopLocked() {
	l.expiry.Stop()
	if l.renewal != nil {
		l.renewal.Stop()
	}
}

// Holders implements [hold.Backend].
func (s *server) Holders(ctx context.Context, keys []string) ([]hold.Holder, error) {
	if err := s.answer(ctx, dbconn.Timeout, s.host.Closing.Done()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	holders, err := s.Locks.Holders(ctx, keys)
	for i := range holders {
		if left := s.remainingLocked(holders[i].ID); left > 0 {
			holders[i].Expires = time.Now().Add(left)
		}
	}
	return holders, err
}

// Keep implements [hold.Backend].
func (s *server) Keep(h *hold.Hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.leases[h]; l != nil && s.living.Err() == nil {
		l.renewal = time.AfterFunc(s.interval(h.TTL), func() { s.renewing.Run(func() { s.keepAlive(h, l) }) })
	}
}

// interval returns how often a hold with that TTL is renewed.
func (s *server) interval(ttl time.Duration) time.Duration {
	if ttl == s.config.TTL {
		return s.config.Renew
	}
	return ttl / 3
}

// keepAlive renews a hold, and again after the interval, or sooner if it was not renewed.
func (s *server) keepAlive(h *hold.Hold, l *lease) {
	err := s.renew(s.living, h, 0, nil)
	next := s.interval(h.Lasts())
	if err != nil {
		next = min(h.Lasts()/20, time.Second) // leaves time for several attempts before the deadline
		if h.Err() == nil && s.living.Err() == nil {
			s.host.Log.Warn("pgxlock: renewal failed", "leases", 1, "error", err)
		}
	}
	if h.Err() != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leases[h] == l && s.living.Err() == nil {
		l.renewal.Reset(next)
	}
}

// Drop implements [hold.Backend].
func (s *server) Drop(h *hold.Hold, _ bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.leases[h]; l != nil && l.renewal != nil {
		l.renewal.Stop()
	}
}

// Renew implements [hold.Backend].
func (s *server) Renew(ctx context.Context, h *hold.Hold) error { return s.renew(ctx, h, 0, nil) }

// Change implements [hold.Backend].
func (s *server) Change(ctx context.Context, h *hold.Hold, ttl time.Duration, metadata *string) error {
	return s.renew(ctx, h, ttl, metadata)
}

// errExpire is why renewals fail after Control.Expire.
var errExpire = fmt.Errorf("%w: Control.Expire makes renewals fail", pgxlock.ErrUnavailable)

// renew renews a hold, with another TTL unless ttl is 0, and other metadata unless that is nil.
func (s *server) renew(ctx context.Context, h *hold.Hold, ttl time.Duration, metadata *string) error {
	sent := s.host.Clock()
	err := s.answer(ctx, min(dbconn.Timeout, h.Lasts()/2), nil)
	if ctx.Err() != nil {
		return lockerr.ContextError(ctx)
	}
	s.renewal.Lock()
	defer s.renewal.Unlock()
	before := h.Lasts()
	ttl = cmp.Or(ttl, before)
	s.mu.Lock()
	if l := s.leases[h]; err == nil && l != nil {
		if l.failing {
			err = errExpire
		} else {
			l.until = s.host.Clock() + ttl
			l.expiry.Reset(ttl)
			_ = s.Locks.Change(ctx, h, ttl, metadata)
		}
	}
	s.mu.Unlock()
	switch {
	case err != nil:
		h.NotRenewed(err)
		return err
	case ttl != before:
		return h.Changed(ttl, s.margin(ttl), sent)
	}
	return h.Renewed(sent) // or why it has ended: a lease that is gone has no hold
}

// Release implements [hold.Backend].
func (s *server) Release(h *hold.Hold) error {
	if err := s.answer(context.Background(), dbconn.Timeout, nil); err != nil {
		return fmt.Errorf("the lease was not released and will expire: %w", err)
	}
	s.Discard(h)
	return nil
}

// Share implements [hold.Backend].
func (s *server) Share(from, to *hold.Hold) error {
	sent := s.host.Clock()
	if err := s.answer(context.Background(), dbconn.Timeout, nil); err != nil {
		return fmt.Errorf("the lease was not released and will expire: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.leases[from]
	if old == nil {
		return &hold.LostError{Why: hold.ErrTakenAway}
	}
	to.Holder, to.TTL, to.Margin = s.config.Owner+":"+rand.Text(), from.TTL, from.Margin
	delete(s.leases, from)
	old.stopLocked()
	if err := s.Locks.Share(from, to); err != nil {
		return err
	}
	if !s.grantedLocked(to, sent) {
		_ = s.Locks.Release(to)
		return hold.ErrLateGrant
	}
	return nil
}

// Discard implements [hold.Backend].
func (s *server) Discard(h *hold.Hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.freeLocked(h)
}

// Close implements [hold.Backend].
func (s *server) Close(ctx context.Context) error {
	s.mu.Lock()
	s.end()
	for _, l := range s.leases {
		l.stopLocked()
	}
	s.mu.Unlock()
	return batcher.Until(ctx, s.renewing.Wait)
}

// holdsLocked returns the holds of Locks on a key.
func (s *server) holdsLocked(key string) (holds []*hold.Hold, err error) {
	var held []string
	for h := range s.leases {
		held = append(held, strconv.Quote(h.Key))
		if h.Key == key {
			holds = append(holds, h)
		}
	}
	if len(holds) > 0 {
		return holds, nil
	}
	others, _ := s.Locks.Holders(context.Background(), []string{key})
	slices.Sort(held)
	switch {
	case len(others) > 0:
		return nil, fmt.Errorf("%s has it, and no Lock", others[0].ID)
	case len(held) > 0:
		return nil, fmt.Errorf("no Lock has it, only %s", strings.Join(slices.Compact(held), ", "))
	}
	return nil, errors.New("no Lock has it, nor any other key; wait until the code under test has acquired it")
}

// lose ends the holds on a key, and gives it to other unless that is nil.
func (s *server) lose(key string, why error, other *hold.Hold) error {
	s.mu.Lock()
	holds, err := s.holdsLocked(key)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	for _, h := range holds { // before others can have the key
		_ = h.Lose(cmp.Or(why, hold.ErrTakenAway))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range holds {
		s.freeLocked(h) // a woken waiter needs s.mu for its try
	}
	if other != nil {
		return s.holdLocked(other)
	}
	return nil
}

func (s *server) expire(key string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	holds, err := s.holdsLocked(key)
	for _, h := range holds {
		s.leases[h].failing = true
	}
	return err
}

func (s *server) refuse(key string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refusals[key] = append(s.refusals[key], err)
}

func (s *server) setDelay(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delay = d
}

// newForeign returns a hold of another process.
func newForeign(key string) *hold.Hold {
	return &hold.Hold{Key: key, Queue: lockkey.Name{Key: key}, Holder: foreignID()}
}

func foreignID() string { return "another-process:" + rand.Text() }

func (s *server) hold(other *hold.Hold) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.holdLocked(other)
}

func (s *server) holdLocked(other *hold.Hold) error {
	attempt := []hold.Attempt{{Hold: other}}
	s.Locks.Try(context.Background(), hold.Request{}, attempt)
	if busy, ok := errors.AsType[*hold.Busy](attempt[0].Err); ok {
		return fmt.Errorf("%s has it; TakeOver ends a Lock that is held", busy.Holder)
	}
	return nil
}

// releaseForeign releases a hold of another process, unless that was done, and wakes the first
// waiter: for a permit that of the semaphore as well.
func (s *server) releaseForeign(other *hold.Hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.Locks.Release(other)
	if i := strings.LastIndex(other.Key, lockkey.PermitMark); i >= 0 {
		s.host.Queue.Freed(lockkey.Name{Key: other.Key[:i+len(lockkey.PermitMark)]})
	}
}
