package pgxlock

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// This file is the kind without a server.

// NewMemory returns a Locker whose locks are in the memory of this process, and
// exclude only other calls of the same Locker: for a program's own unit tests,
// also in [testing/synctest] bubbles, and for programs that run alone. It keeps
// the contract of the other kinds, with these differences: its locks are never
// lost and have no deadline, so that a TTL changes nothing; and there is no
// transaction that it could fence ([errors.ErrUnsupported]).
func NewMemory() *Locker {
	began := time.Now()
	l := newLocker(Memory, func() time.Duration { return time.Since(began) }, defaultBackoff, slog.New(slog.DiscardHandler))
	l.backend = &memory{locker: l, held: make(map[string]*memoryLock)}
	return l
}

// memory is the backend of a Memory Locker.
type memory struct {
	locker *Locker

	mu    sync.Mutex
	token int64
	held  map[string]*memoryLock
}

type memoryLock struct {
	lock     *Lock
	metadata string
	since    time.Time
}

func (m *memory) options() options      { return options{} }
func (m *memory) takes(opt Option) bool { return takenExclusively(opt) }

func (m *memory) check(key string) error   { return checkKey(key) }
func (m *memory) name(key string) lockName { return lockName{key: key} }

func (m *memory) try(ctx context.Context, keys []string, o options) []attempt {
	m.mu.Lock()
	defer m.mu.Unlock()
	attempts := make([]attempt, len(keys))
	for i, key := range keys {
		if ctx.Err() != nil {
			attempts[i].err = context.Cause(ctx)
			continue
		}
		if h, busy := m.held[key]; busy {
			attempts[i].err = &busyError{holder: h.lock.holder, here: true}
			continue
		}
		m.token++
		lock := m.locker.newLock(key, "memory:"+rand.Text(), 0, 0)
		now := m.locker.now()
		lock.granted(m.token, now, now)
		h := &memoryLock{lock: lock, since: time.Now()}
		if o.metadata != nil {
			_ = json.Unmarshal([]byte(*o.metadata), &h.metadata) // of our own making
		}
		m.held[key] = h
		attempts[i].lock = lock
	}
	return attempts
}

func (m *memory) holders(_ context.Context, key string) ([]Holder, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h, busy := m.held[key]
	if !busy {
		return nil, nil
	}
	return []Holder{{Key: key, Kind: Memory, Owner: h.lock.holder, Metadata: h.metadata, Token: h.lock.token, Since: h.since}}, nil
}

func (m *memory) release(l *Lock) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h, busy := m.held[l.key]; busy && h.lock == l {
		delete(m.held, l.key)
		m.locker.lines.freed(m.name(l.key))
	}
	return nil
}

func (m *memory) keep(*Lock)                         {}
func (m *memory) drop(*Lock)                         {}
func (m *memory) renew(context.Context, *Lock) error { return nil }
func (m *memory) holdID(*Lock) string                { return "" }
func (m *memory) discard(l *Lock)                    { _ = m.release(l) }
func (m *memory) close(context.Context) error        { return nil }

func (m *memory) fence(context.Context, transaction, *Lock) error {
	return fmt.Errorf("a lock in memory cannot protect a transaction: %w", errors.ErrUnsupported)
}
