package pgxlock

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/usertx"
)

// Memory Lockers are the kind without a server.

// NewMemoryLocker returns a Locker whose locks are in the memory of this process, and
// exclude only other calls of the same Locker: for a program's own unit tests,
// also in [testing/synctest] bubbles, and for programs that run alone. It keeps
// the contract of the other kinds, with these differences: its locks are never
// lost and have no deadline, so that a TTL changes nothing; and there is no
// transaction that it could fence ([errors.ErrUnsupported]).
func NewMemoryLocker() *Locker {
	began := time.Now()
	l := newLocker(KindMemory, func() time.Duration { return time.Since(began) }, defaultBackoff, slog.New(slog.DiscardHandler))
	l.backend = &memory{locker: l, held: make(map[string]*memoryHold)}
	return l
}

// memory is the backend of a Memory Locker.
type memory struct {
	locker *Locker

	mu    sync.Mutex
	token int64
	held  map[string]*memoryHold
}

// memoryHold is a key that one has, or many who share it.
type memoryHold struct {
	mode  Mode
	token int64
	locks []memoryLock
}

type memoryLock struct {
	lock     *Lock
	metadata string
	since    time.Time
}

func (m *memory) options() options      { return options{} }
func (m *memory) takes(opt Option) bool { return takenByLocks(opt) }

func (m *memory) check(key string) error       { return lockkey.Check(key) }
func (m *memory) name(key string) lockkey.Name { return lockkey.Name{Key: key} }

func (m *memory) try(ctx context.Context, keys []string, o options) []attempt {
	m.mu.Lock()
	defer m.mu.Unlock()
	attempts := make([]attempt, len(keys))
	for i, key := range keys {
		if ctx.Err() != nil {
			attempts[i].err = context.Cause(ctx)
			continue
		}
		queue := key
		for n := range int(o.permits) {
			if key = permitKey(queue, n+1); m.held[key] == nil {
				break
			}
		}
		h := m.held[key]
		if h != nil && (h.mode == Exclusive || o.mode == Exclusive) {
			attempts[i].err = &busyError{holder: h.locks[0].lock.holder, here: true}
			continue
		}
		if h == nil {
			m.token++
			h = &memoryHold{mode: o.mode, token: m.token}
			m.held[key] = h
		}
		lock := m.locker.newLock(key, "memory:"+rand.Text(), 0, 0)
		lock.queue = queue
		now := m.locker.now()
		lock.granted(h.token, now, now)
		held := memoryLock{lock: lock, since: time.Now()}
		if o.metadata != nil {
			_ = json.Unmarshal([]byte(*o.metadata), &held.metadata) // of our own making
		}
		h.locks = append(h.locks, held)
		attempts[i].lock = lock
	}
	return attempts
}

func (m *memory) holders(_ context.Context, keys []string) (holders []Holder, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, key := range keys {
		h := m.held[key]
		if h == nil {
			continue
		}
		for _, held := range h.locks {
			holders = append(holders, Holder{Key: key, Kind: KindMemory, Mode: h.mode, ID: held.lock.holder, Metadata: held.metadata, Token: h.token, Since: held.since})
		}
	}
	return holders, nil
}

func (m *memory) release(l *Lock) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := m.held[l.key]
	if h == nil {
		return nil
	}
	h.locks = slices.DeleteFunc(h.locks, func(held memoryLock) bool { return held.lock == l })
	if len(h.locks) == 0 {
		delete(m.held, l.key)
		m.locker.lines.freed(m.name(l.queue))
	}
	return nil
}

func (m *memory) keep(*Lock)                         {}
func (m *memory) drop(*Lock)                         {}
func (m *memory) renew(context.Context, *Lock) error { return nil }
func (m *memory) holdID(*Lock) string                { return "" }
func (m *memory) discard(l *Lock)                    { _ = m.release(l) }
func (m *memory) close(context.Context) error        { return nil }

func (m *memory) fence(context.Context, usertx.Tx, *Lock) error {
	return fmt.Errorf("a lock in memory cannot protect a transaction: %w", errors.ErrUnsupported)
}
