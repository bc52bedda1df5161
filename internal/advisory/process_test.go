package advisory

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/usertx"
)

// A process is Locks with the holds of a Locker. Its callers have no queue: a caller that waits
// tries again and again.
type process struct {
	*Locks
	holds   hold.Group
	closing func() // says that the Locker is being closed
}

// newProcess returns a process that is not connected yet.
func newProcess(t *testing.T, pool *pgxpool.Pool, cfg Config, now clock.Clock) *process {
	t.Helper()
	cfg.Owner = "me"
	if cfg.TTL == 0 {
		cfg.TTL = 2 * pgtest.Patience
	}
	closing, end := context.WithCancel(context.Background())
	p := &process{Locks: New(pool.Config(), cfg), closing: end}
	connect := p.mux.connect
	p.mux.connect = func(ctx context.Context) (*session, error) {
		s, err := connect(ctx)
		if err == nil {
			s.patience = pgtest.Patience // however slow this machine is
		}
		return s, err
	}
	p.holds.Clock, p.holds.Backend = now, p.Locks
	p.Use(hold.Host{Clock: now, Log: slog.New(slog.DiscardHandler), Closing: closing, Queue: noQueue{}})
	t.Cleanup(func() {
		end()
		ctx, cancel := context.WithTimeout(context.Background(), pgtest.Patience) // a test that failed may still have the lead
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return p
}

// connected returns a process that has its session.
func connected(t *testing.T, pool *pgxpool.Pool, cfg Config) *process {
	t.Helper()
	p := newProcess(t, pool, cfg, clock.System)
	if err := mustAcquire(t, p, "warm", hold.Exclusive).release(); err != nil {
		t.Fatal(err)
	}
	return p
}

// noQueue is the queue of callers that never wait.
type noQueue struct{ hold.Queue }

func (noQueue) HandOver(lockkey.Name, hold.Release) bool           { return false }
func (noQueue) Freed(lockkey.Name) bool                            { return false }
func (noQueue) Wake([]lockkey.Name)                                {}
func (noQueue) WakeOn(func(dbconn.Exchange) error, []lockkey.Name) {}
func (noQueue) Contended(lockkey.Name) bool                        { return false }
func (noQueue) WaitedFor(context.Context, []lockkey.Name) []bool   { return nil }
func (noQueue) Listen(int32)                                       {}
func (noQueue) Reap() error                                        { return nil }
func (noQueue) Close()                                             {}

// An owner is the Lock of a hold here.
type owner struct{}

func (owner) Ended(why error, _ time.Duration) error { return why }
func (owner) Renewed(error)                          {}
func (owner) Close(context.Context) error            { return nil }

// A held is a hold of a process.
type held struct {
	*hold.Hold
	process *process
}

// newHold returns a hold that is not asked for yet.
func (p *process) newHold(key string, mode hold.Mode) *hold.Hold {
	h := &hold.Hold{Mode: mode}
	p.holds.Begin(h, owner{}, key, lockkey.Name{ID: lockkey.Identify(key)})
	return h
}

// acquire tries until the lock is granted, as Acquire of a Locker does.
func (p *process) acquire(ctx context.Context, key string, mode hold.Mode) (held, error) {
	return p.ask(ctx, key, mode, hold.Turn{})
}

// try tries once, and once more if the grant is lost at once, as TryAcquire of a Locker does.
func (p *process) try(ctx context.Context, key string, mode hold.Mode) (held, error) {
	return p.ask(ctx, key, mode, hold.Turn{SkipQueue: true})
}

func (p *process) ask(ctx context.Context, key string, mode hold.Mode, turn hold.Turn) (held, error) {
	for lost := 0; ; {
		h := p.newHold(key, mode)
		attempts := []hold.Attempt{{Hold: h}}
		p.Try(ctx, hold.Request{Mode: mode, Turn: turn}, attempts)
		err := attempts[0].Err
		if err == nil {
			err = h.Admit()
		}
		switch {
		case err == nil:
			return held{h, p}, nil
		case errors.Is(err, lockerr.ErrLost) || errors.Is(err, hold.ErrLateGrant):
			_ = p.Release(h)
			if lost++; lost > 1 && turn.SkipQueue {
				return held{}, err
			}
		case turn.SkipQueue || !errors.Is(err, lockerr.ErrNotAcquired) || !clock.Sleep(ctx, 10*time.Millisecond):
			return held{}, err
		}
	}
}

// tryAll tries once for all keys, and returns the errors of all.
func (p *process) tryAll(ctx context.Context, keys []string, mode hold.Mode) error {
	var attempts []hold.Attempt
	for _, key := range keys {
		attempts = append(attempts, hold.Attempt{Hold: p.newHold(key, mode)})
	}
	p.Try(ctx, hold.Request{Mode: mode}, attempts)
	var errs []error
	for _, attempt := range attempts {
		errs = append(errs, attempt.Err)
	}
	return errors.Join(errs...)
}

// release ends the hold as Release of a Lock does.
func (h held) release() error {
	if lost := h.End(lockerr.ErrReleased); lost != nil {
		h.process.Discard(h.Hold)
		return lost
	}
	return h.process.Release(h.Hold)
}

// fence protects the transaction as Fence of a Lock does.
func (h held) fence(ctx context.Context, tx pgx.Tx) error {
	return h.process.Fence(ctx, usertx.Pgx(tx), h.Hold)
}

// rows returns the cases that a run with -short has: those of the names, of which each shows the
// contract.
func rows[C any](all map[string]C, names ...string) map[string]C {
	if testing.Short() {
		maps.DeleteFunc(all, func(name string, _ C) bool { return !slices.Contains(names, name) })
	}
	return all
}

// mustAcquire acquires. It goes on while the server cannot be reached, as Acquire of a Locker does.
func mustAcquire(t *testing.T, p *process, key string, mode hold.Mode) (lock held) {
	t.Helper()
	pgtest.Until(t, key+" is acquired", func() bool {
		var err error
		if lock, err = p.acquire(t.Context(), key, mode); err != nil && !errors.Is(err, lockerr.ErrUnavailable) {
			t.Fatal(err)
		}
		return err == nil
	})
	return lock
}

// wantFree checks that no session has the advisory lock once the mux has sent what was in its
// queue.
func wantFree(t *testing.T, p *process, key string) {
	t.Helper()
	if holders, err := p.Holders(t.Context(), []string{key}); err != nil || len(holders) != 0 {
		t.Errorf("the holders of %s are %+v, %v; want none", key, holders, err)
	}
}

// becomesFree waits until the server has released what callers had left: nobody waits for
// that.
func becomesFree(t *testing.T, p *process, key string) {
	t.Helper()
	pgtest.Until(t, key+" is free", func() bool {
		holders, err := p.Holders(t.Context(), []string{key})
		if err != nil {
			t.Fatal(err)
		}
		return len(holders) == 0
	})
}

// tried is the outcome of an acquire that ran beside the test.
type tried struct {
	lock held
	err  error
}

func acquiring(ctx context.Context, p *process, key string, mode hold.Mode) <-chan tried {
	return beside(ctx, key, mode, p.acquire)
}

func trying(ctx context.Context, p *process, key string, mode hold.Mode) <-chan tried {
	return beside(ctx, key, mode, p.try)
}

func beside(ctx context.Context, key string, mode hold.Mode, acquire func(context.Context, string, hold.Mode) (held, error)) <-chan tried {
	done := make(chan tried, 1)
	go func() {
		lock, err := acquire(ctx, key, mode)
		done <- tried{lock, err}
	}()
	return done
}

// numberOf returns the number of the advisory lock for a key.
func numberOf(key string) int64 { return lockkey.Identify(key).Number }
