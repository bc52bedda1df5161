package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// Locks are acquired together, all or none, and are used and released together. They are in
// the order in which every call takes them: sorted by key, or by number for advisory locks;
// permits of [Semaphore.AcquireN] in any order.
type Locks []*Lock

// AcquireAll acquires a lock on each of the keys, or none. It returns when it holds all of
// them, each with at least half of its TTL left. Keys that name the same lock are locked once.
// Without keys it returns no locks and no error.
//
// If all keys are free, AcquireAll takes one statement. Otherwise it holds the keys before the
// first busy one, in the order of [Locks], and waits for that one: callers that list the same
// keys in different orders do not deadlock. It renews what it holds meanwhile; if it loses some
// of it, it releases the rest and starts over. MaxWait bounds the whole call, and with [NoWait]
// one busy key fails it. The errors are those of [Locker.Acquire]; [Error].Key is the busy key.
// On failure nothing is held: AcquireAll releases what it had before it returns or, if the
// server does not answer within a second, in the background.
func (l *Locker) AcquireAll(ctx context.Context, keys []string, opts ...AcquireOption) (Locks, error) {
	if err := l.begin(ctx); err != nil {
		return nil, l.fail("acquire", "", err)
	}
	defer l.calls.End()
	a := l.newAcquisition(ctx)
	if err := l.collect(&a.options, opts); err != nil {
		return nil, l.fail("acquire", "", err)
	}
	compare := func(a, b string) int { return l.name(a).Compare(l.name(b)) }
	keys = slices.SortedStableFunc(slices.Values(keys), compare)
	keys = slices.CompactFunc(keys, func(a, b string) bool { return compare(a, b) == 0 })
	for _, key := range keys {
		if err := l.check(key); err != nil {
			return nil, l.fail("acquire", key, err)
		}
	}
	only := ""
	if len(keys) == 1 {
		only = keys[0]
	}
	a.begin(only)
	defer a.end()
	for _, key := range keys {
		if err := l.mayWait(ctx, key, a.options.Mode); err != nil {
			return nil, a.failed(key, err)
		}
	}
	for {
		locks, key, err := a.gather(keys)
		if err == nil {
			a.observed.succeeded(nil, locks...)
			return locks, nil
		}
		a.Leave()
		a.giveUp(locks)
		if errors.Is(err, ErrLost) {
			if a.lost++; a.lost == 1 || a.Waits() {
				continue
			}
			err = grantLost(err)
		}
		return nil, a.failed(key, err)
	}
}

// gather acquires the locks one prefix of the keys after another. With an error it
// also returns what is held so far, and the key that failed; ErrLost: start over.
func (a *acquisition) gather(keys []string) (locks Locks, failed string, err error) {
	locks = slices.Grow(locks, len(keys)) // nil without keys
	for ask := len(keys); len(locks) < len(keys); {
		a.Holding(locks.holds())
		next := keys[len(locks):]
		if !a.Queued() {
			if ask = min(ask, a.unclaimed(next)); ask == 0 {
				if err := a.join(next[0]); err != nil {
					return locks, next[0], err
				}
				ask = 1
			}
		}
		if key, err := a.behindWriter(next); err != nil {
			return locks, key, a.wait(key, err)
		}
		var refused error
		var early Locks // locks after the refused one: another caller may need them before
		for i, got := range a.try(next[:min(ask, len(next))], false) {
			switch {
			case got.err == nil && refused == nil:
				locks = append(locks, got.lock)
				a.Granted()
			case got.err == nil:
				early = append(early, got.lock)
			case refused == nil:
				refused, failed = got.err, next[i]
			}
		}
		ask = len(keys)
		if refused != nil {
			a.Holding(locks.holds())
			if busy, ok := errors.AsType[*hold.Busy](refused); ok && len(early) > 0 && !a.options.noWait() {
				a.observed.busy(failed, busy.Holder)
				a.Enqueue(a.locker.name(failed), busy) // before the release below wakes others, which could then come first
			}
			a.giveUp(early)
			if i := slices.IndexFunc(next, func(key string) bool { return a.Knows(a.locker.name(key), refused) }); i >= 0 {
				failed = next[i] // the server has answered about none of them
			}
			if err := a.wait(failed, refused); err != nil {
				return locks, failed, err
			}
			ask = 1 // only the busy one: leave the others alone until it is acquired
		}
		for _, lock := range locks {
			if err := lock.Err(); err != nil {
				return locks, lock.Key(), err
			}
		}
	}
	for _, lock := range locks {
		if until, bounded := lock.Deadline(); bounded && time.Until(until) < lock.hold.TTL/2 {
			ctx, cancel := a.bounded()
			err := lock.Renew(ctx)
			over := cmp.Or(a.Ended(), context.Cause(ctx))
			cancel()
			switch {
			case over != nil && !errors.Is(err, ErrLost):
				return locks, lock.Key(), a.EndError(over)
			case err != nil:
				return locks, lock.Key(), err
			}
		}
	}
	return locks, "", nil
}

// giveUp releases what the call does not return. It waits for the answer of a server that answers,
// so that the caller finds the keys free; a release is retried for longer.
func (a *acquisition) giveUp(locks Locks) {
	if len(locks) == 0 {
		return
	}
	caller := context.WithoutCancel(a.caller)
	ctx, cancel := context.WithTimeout(caller, giveUpPatience)
	defer cancel()
	a.release(ctx, func() error { return locks.Release(caller) })
}

// giveUpPatience bounds by how much AcquireAll may outlast its wait.
const giveUpPatience = time.Second

// unclaimed returns how many of the keys come before the first one that has a local queue.
func (a *acquisition) unclaimed(keys []string) int {
	if !a.MayJoin() {
		return len(keys)
	}
	for i, key := range keys {
		if a.locker.queue.Waiting(a.locker.name(key)) {
			return i
		}
	}
	return len(keys)
}

// holds returns the holds of the locks; nil for none.
func (ls Locks) holds() (holds []*hold.Hold) {
	for _, l := range ls {
		holds = append(holds, &l.hold)
	}
	return holds
}

// Context is [Lock.Context] for all of them: it ends as soon as one of the locks does.
func (ls Locks) Context(parent context.Context) (context.Context, context.CancelFunc) {
	if len(ls) == 0 {
		if err := lockerr.MissingContext(parent); err != nil {
			return endedContext(fail("hold", "", 0, err))
		}
		return context.WithCancel(parent)
	}
	all := &locksContext{Context: parent}
	cancels := make([]context.CancelFunc, len(ls))
	for i, l := range ls {
		all.Context, cancels[i] = l.Context(all.Context)
		all.each = append(all.each, all.Context)
	}
	return all, func() {
		for _, cancel := range slices.Backward(cancels) {
			cancel()
		}
	}
}

// locksContext is a context whose Err checks every lock. Each of the contexts is a child of the
// one before, so that the last one ends when any of them does.
type locksContext struct {
	context.Context // the last of each
	each            []context.Context
}

func (c *locksContext) Err() error {
	for _, ctx := range c.each {
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// Fence is [Lock.Fence] for all of them. It stops at the first error.
func (ls Locks) Fence(ctx context.Context, tx pgx.Tx) error {
	for _, l := range ls {
		if err := l.Fence(ctx, tx); err != nil {
			return err
		}
	}
	return nil
}

// FenceSQL is [Lock.FenceSQL] for all of them. It stops at the first error.
func (ls Locks) FenceSQL(ctx context.Context, tx SQLTx) error {
	for _, l := range ls {
		if err := l.FenceSQL(ctx, tx); err != nil {
			return err
		}
	}
	return nil
}

// Release is [Lock.Release] for all of them at the same time. It joins their errors.
func (ls Locks) Release(ctx context.Context) error {
	errs := make([]error, len(ls))
	var releasing sync.WaitGroup
	for i, l := range ls {
		releasing.Go(func() { errs[i] = l.Release(ctx) })
	}
	releasing.Wait()
	return errors.Join(errs...)
}
