// Package memory makes locks without a server. They exclude callers of one Locker.
//
// Lock order: Locks.mu, then Hold.mu of a hold that nobody else knows yet, or the queue's.
package memory

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Locks implements [hold.Backend] without a server.
type Locks struct {
	clock clock.Clock
	queue hold.LocalQueue

	mu    sync.Mutex
	token int64
	held  map[string]*entry
}

// An entry is a key that one hold has, or several holds share.
type entry struct {
	mode  hold.Mode
	token int64
	locks []member
}

type member struct {
	lock     *hold.Hold
	metadata string
	since    time.Time
}

// permitsLocked returns the keys of a free permit for each of the attempts, if they are for permits, or
// why there are too few.
func (m *Locks) permitsLocked(o hold.Request, attempts []hold.Attempt) (free []string, busy error) {
	for n := range o.Permits {
		key := lockkey.Permit(attempts[0].Hold.Key, n+1)
		if h := m.held[key]; h != nil {
			busy = &hold.Busy{Holder: h.locks[0].lock.Holder, Here: true}
		} else if free = append(free, key); len(free) == len(attempts) {
			return free, nil
		}
	}
	return nil, busy
}

// describe sets the metadata, unless it is nil.
func (m *member) describe(metadata *string) {
	if metadata != nil {
		_ = json.Unmarshal([]byte(*metadata), &m.metadata) // package pgxlock encoded it
	}
}

// New returns Locks, of which queue hears when one is free.
func New(clock clock.Clock, queue hold.LocalQueue) *Locks {
	return &Locks{clock: clock, queue: queue, held: make(map[string]*entry)}
}

// A Lease is what a LeaseConfig says of every lease.
type Lease struct {
	Owner              string
	TTL, Renew, Margin time.Duration
}

// NewLocker returns a *pgxlock.Locker in memory with a backend of its own and what a
// *pgxlock.LeaseConfig says. Package pgxlock sets it and package locktesting calls it, so that
// the API of pgxlock has nothing that only tests need.
var NewLocker func(config any, backend func(hold.Host, Lease) hold.Backend) (locker any, err error)

// Try implements [hold.Backend]. A hold that has a Holder keeps it.
func (m *Locks) Try(ctx context.Context, o hold.Request, attempts []hold.Attempt) {
	var ended error
	if ctx.Err() != nil { // without m.mu: the context may be that of another lock, with a mutex of its own
		ended = context.Cause(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	free, busy := m.permitsLocked(o, attempts)
	for i := range attempts {
		lock := attempts[i].Hold
		key := lock.Key
		switch {
		case ended != nil:
			attempts[i].Err = ended
			continue
		case busy != nil:
			attempts[i].Err = busy
			continue
		case free != nil:
			key = free[i]
		}
		h := m.held[key]
		if h != nil && (h.mode == hold.Exclusive || o.Mode == hold.Exclusive) {
			attempts[i].Err = &hold.Busy{Holder: h.locks[0].lock.Holder, Here: true}
			continue
		}
		if h == nil {
			m.token++
			h = &entry{mode: o.Mode, token: m.token}
			m.held[key] = h
		}
		lock.Key = key
		if lock.Holder == "" {
			lock.Holder = "memory:" + rand.Text()
		}
		now := m.clock()
		lock.Granted(h.token, now, now)
		held := member{lock: lock, since: time.Now()}
		held.describe(o.Metadata)
		h.locks = append(h.locks, held)
	}
}

// Holders implements [hold.Backend].
func (m *Locks) Holders(_ context.Context, keys []string) (holders []hold.Holder, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, key := range keys {
		h := m.held[key]
		if h == nil {
			continue
		}
		for _, held := range h.locks {
			holders = append(holders, hold.Holder{Key: key, Mode: h.mode, ID: held.lock.Holder, Metadata: held.metadata, Token: h.token, Since: held.since})
		}
	}
	return holders, nil
}

// Release implements [hold.Backend].
func (m *Locks) Release(l *hold.Hold) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := m.held[l.Key]
	if h == nil {
		return nil
	}
	h.locks = slices.DeleteFunc(h.locks, func(held member) bool { return held.lock == l })
	if len(h.locks) == 0 {
		delete(m.held, l.Key)
		m.queue.Freed(l.Queue)
	}
	return nil
}

// Share implements [hold.Backend].
func (m *Locks) Share(from, to *hold.Hold) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := m.held[from.Key]
	if to.Holder == "" {
		to.Holder = "memory:" + rand.Text()
	}
	now := m.clock()
	to.Granted(h.token, now, now)
	h.mode, h.locks = hold.Shared, []member{{lock: to, metadata: h.locks[0].metadata, since: time.Now()}}
	m.queue.Freed(from.Queue)
	return nil
}

// A lock in memory is never lost, so that nothing renews it.

// Keep implements [hold.Backend].
func (m *Locks) Keep(*hold.Hold) {}

// Drop implements [hold.Backend].
func (m *Locks) Drop(*hold.Hold, bool) {}

// Renew implements [hold.Backend].
func (m *Locks) Renew(context.Context, *hold.Hold) error { return nil }

// Change implements [hold.Backend].
func (m *Locks) Change(_ context.Context, l *hold.Hold, _ time.Duration, metadata *string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h := m.held[l.Key]; h != nil {
		for i := range h.locks {
			if h.locks[i].lock == l {
				h.locks[i].describe(metadata)
			}
		}
	}
	return nil
}

// ID implements [hold.Backend].
func (m *Locks) ID(*hold.Hold) string { return "" }

// Discard implements [hold.Backend].
func (m *Locks) Discard(l *hold.Hold) { _ = m.Release(l) }

// Close implements [hold.Backend].
func (m *Locks) Close(context.Context) error { return nil }

// Fence implements [hold.Backend].
func (m *Locks) Fence(context.Context, hold.Tx, *hold.Hold) error {
	return fmt.Errorf("a lock in memory cannot protect a transaction: %w", errors.ErrUnsupported)
}
