package pgxlock

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// These tests lose locks between the grant and the return of the call that asked for them.

// A losingBackend loses what the next tries are granted, before their callers see it.
type losingBackend struct {
	backend
	times atomic.Int32 // how many grants are lost
	lose  func()
}

func (b *losingBackend) try(ctx context.Context, keys []string, o options) []attempt {
	got := b.backend.try(ctx, keys, o)
	for _, a := range got {
		if a.err != nil || b.times.Add(-1) < 0 {
			continue
		}
		for b.lose(); a.lock.Err() == nil; { // the end of a session takes a moment to be heard of
			time.Sleep(time.Millisecond)
		}
	}
	return got
}

// losing returns Lockers of each kind on a database with the migrations, whose grants get lost:
// those of leases because the process does not run until their deadline, those of advisory
// locks because their session is ended.
func losing(t *testing.T) (pool *pgxpool.Pool, lockers map[string]func(t *testing.T) (*Locker, *losingBackend)) {
	t.Helper()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	advisory := func(cfg *AdvisoryConfig) func(t *testing.T) (*Locker, *losingBackend) {
		return func(t *testing.T) (*Locker, *losingBackend) {
			l, err := NewAdvisoryLocker(db.Pool, cfg)
			if err != nil {
				t.Fatal(err)
			}
			a := l.backend.(*advisoryLocks)
			return lossy(t, l, func() {
				a.mu.Lock()
				pid := a.pid
				a.mu.Unlock()
				db.Exec(t, "select pg_terminate_backend($1)", pid)
			})
		}
	}
	return db.Pool, map[string]func(t *testing.T) (*Locker, *losingBackend){
		"lease": func(t *testing.T) (*Locker, *losingBackend) {
			l, err := NewLeaseLocker(db.Pool, nil)
			if err != nil {
				t.Fatal(err)
			}
			return lossy(t, l, frozen(l))
		},
		"advisory":             advisory(nil),
		"advisory with tokens": advisory(&AdvisoryConfig{Tokens: true}),
	}
}

// frozen returns what makes the Locker believe that it was frozen until its leases' deadlines.
func frozen(l *Locker) func() {
	var ahead atomic.Int64
	l.now = func() time.Duration { return clock.System() + time.Duration(ahead.Load()) }
	return func() { ahead.Add(int64(time.Hour)) }
}

func lossy(t *testing.T, l *Locker, lose func()) (*Locker, *losingBackend) {
	b := &losingBackend{backend: l.backend, lose: lose}
	l.backend = b
	t.Cleanup(func() {
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return l, b
}

func TestAcquireAsksAgainWhenItsGrantIsLostBeforeItReturns(t *testing.T) {
	t.Parallel()
	pool, kinds := losing(t)
	work := func(_ context.Context, lock *Lock) error { return lock.Err() }
	for kind, newLosing := range kinds {
		for name, call := range map[string]func(context.Context, *Locker, string) error{
			"Acquire": func(ctx context.Context, l *Locker, key string) error {
				lock, err := l.Acquire(ctx, key)
				return errors.Join(err, released(ctx, lock))
			},
			"TryAcquire": func(ctx context.Context, l *Locker, key string) error {
				lock, err := l.TryAcquire(ctx, key)
				return errors.Join(err, released(ctx, lock))
			},
			"Acquire, Shared": func(ctx context.Context, l *Locker, key string) error {
				lock, err := l.Acquire(ctx, key, Shared)
				return errors.Join(err, released(ctx, lock))
			},
			"AcquireAll": func(ctx context.Context, l *Locker, key string) error {
				locks, err := l.AcquireAll(ctx, []string{key, key + "2"})
				return errors.Join(err, locks.Release(ctx))
			},
			"AcquireAll, NoWait": func(ctx context.Context, l *Locker, key string) error {
				locks, err := l.AcquireAll(ctx, []string{key, key + "2"}, NoWait)
				return errors.Join(err, locks.Release(ctx))
			},
			"Do": func(ctx context.Context, l *Locker, key string) error { return l.Do(ctx, key, work) },
			"TryDo": func(ctx context.Context, l *Locker, key string) error {
				ran, err := l.TryDo(ctx, key, work)
				if !ran {
					t.Error("TryDo did not run")
				}
				return err
			},
			"DoTx": func(ctx context.Context, l *Locker, key string) error {
				err := l.DoTx(ctx, pool, key, func(context.Context, pgx.Tx, *Lock) error { return nil })
				if errors.Is(err, errors.ErrUnsupported) { // without tokens there is nothing to fence
					return nil
				}
				return err
			},
			"Lead": func(ctx context.Context, l *Locker, key string) error { return l.Lead(ctx, key, work) },
			"a permit": func(ctx context.Context, l *Locker, key string) error {
				s, err := l.Semaphore(2)
				if err != nil {
					return nil // there are none of this kind
				}
				lock, err := s.TryAcquire(ctx, key)
				return errors.Join(err, released(ctx, lock))
			},
		} {
			t.Run(kind+"/"+name, func(t *testing.T) {
				t.Parallel()
				l, b := newLosing(t)
				b.times.Store(1)
				if err := call(t.Context(), l, kind+" "+name); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// released releases a lock, which must be held until then; there may be none.
func released(ctx context.Context, lock *Lock) error {
	if lock == nil {
		return nil
	}
	return errors.Join(lock.Err(), lock.Release(ctx))
}

func TestAcquireEndsAsUnavailableWhenItsGrantsAreLostAgainAndAgain(t *testing.T) {
	t.Parallel()
	_, kinds := losing(t)
	for kind, newLosing := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			l, b := newLosing(t)
			for name, call := range map[string]func(string) error{
				"Acquire":    func(key string) error { _, err := l.Acquire(t.Context(), key); return err },
				"TryAcquire": func(key string) error { _, err := l.TryAcquire(t.Context(), key); return err },
				"AcquireAll": func(key string) error { _, err := l.AcquireAll(t.Context(), []string{key, key + "2"}); return err },
				"AcquireAll, NoWait": func(key string) error {
					_, err := l.AcquireAll(t.Context(), []string{key, key + "2"}, NoWait)
					return err
				},
				"TryDo": func(key string) error {
					ran, err := l.TryDo(t.Context(), key, func(context.Context, *Lock) error { return nil })
					if ran {
						t.Error("TryDo ran")
					}
					return err
				},
			} {
				key := kind + " " + name
				b.times.Store(1000)
				err := call(key)
				b.times.Store(0)
				mustBe(t, name, err, ErrUnavailable)
				mustNotBe(t, name, err, ErrLost, ErrNotAcquired)
				if pgErr, ok := errors.AsType[*pgconn.PgError](err); strings.HasPrefix(kind, "advisory") && (!ok || pgErr.Code != "57P01") {
					t.Errorf("%s: %v does not wrap what ended the session", name, err)
				}
				lock, err := l.TryAcquire(t.Context(), key) // nothing of it is in the way
				if err := errors.Join(err, released(t.Context(), lock)); err != nil {
					t.Errorf("after %s: %v", name, err)
				}
			}
		})
	}
}
