package pgxlock

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// These tests release a lock while another caller of the process waits for the answer to
// a request for it that it did not send itself.

// tokenWire returns a connected Locker with Tokens, its backend and its database.
func tokenWire(t *testing.T) (*pgtest.DB, *Locker, *advisoryLocks) {
	t.Helper()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	locks, a := advisoryWire(t, db.Pool, &AdvisoryConfig{Tokens: true})
	return db, locks, a
}

// behind starts one call for k, and another one while the request of the first is in
// flight. It returns when the first has its answer: the second one has none before the
// test calls a.wire.pass. If left is true, the first caller leaves before its answer.
func behind(t *testing.T, locks *Locker, a *advisoryLocks, left bool, first, second []Option) (got tried, next <-chan tried) {
	t.Helper()
	_ = stall(a.wire)
	ctx, leave := context.WithCancel(t.Context())
	t.Cleanup(leave)
	ahead := acquiring(ctx, locks, "k", first...)
	queued(t, a.wire, 2)
	if err := a.wire.begin(); err != nil {
		t.Fatal(err)
	}
	next = acquiring(t.Context(), locks, "k", second...)
	queued(t, a.wire, 1)
	if left {
		leave()
		got = <-ahead
	}
	if err := a.wire.conn.receive(&a.wire.message); err != nil {
		t.Fatal(err)
	}
	a.wire.answered()
	if !left {
		got = <-ahead
	}
	return got, next
}

func fenced(t *testing.T, db *pgtest.DB, lock *Lock) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if err := lock.Fence(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	return tx
}

// releasing releases beside the test, and returns when the release is in the queue.
func releasing(t *testing.T, a *advisoryLocks, lock *Lock) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- lock.Release(t.Context()) }()
	queued(t, a.wire, 1)
	return done
}

func TestAdvisoryHandoverDrawsATokenAndWaitsForTheFencedTransaction(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string][]Option{"a try": {NoWait}, "a wait": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, locks, a := tokenWire(t)
			got, next := behind(t, locks, a, false, nil, opts)
			if got.err != nil {
				t.Fatal(got.err)
			}
			tx := fenced(t, db, got.lock)
			released := releasing(t, a, got.lock)
			a.wire.pass()
			if err := <-released; err != nil {
				t.Error(err)
			}
			if opts != nil {
				if second := <-next; !errors.Is(second.err, ErrNotAcquired) {
					t.Fatalf("a grant beside an open fenced transaction: %+v", second)
				}
				next = acquiring(t.Context(), locks, "k")
			}
			// Once refused it waits; the server sees this query after that refusal.
			var row bool
			const fence = "select exists (select from pgxlock_advisory_locks where key_id = $1 and token is null)"
			if err := db.Pool.QueryRow(t.Context(), fence, AdvisoryID("k")).Scan(&row); err != nil || !row {
				t.Errorf("the row that the fence pins is there: %v, %v", row, err)
			}
			select {
			case second := <-next:
				t.Fatalf("a grant beside an open fenced transaction: %+v", second)
			default:
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			second := <-next
			if second.err != nil {
				t.Fatal(second.err)
			}
			if second.lock.Token() <= got.lock.Token() {
				t.Errorf("token %d after %d", second.lock.Token(), got.lock.Token())
			}
			if err := fenced(t, db, second.lock).Rollback(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A caller that left never had the lock: the next caller has the same grant.
func TestAdvisoryGrantOfACallerThatLeftBringsItsTokenToTheNext(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]Mode{"exclusive": Exclusive, "shared": Shared} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, locks, a := tokenWire(t)
			_, next := behind(t, locks, a, true, []Option{mode}, []Option{mode, NoWait})
			a.wire.pass()
			got := <-next
			if got.err != nil {
				t.Fatal(got.err)
			}
			if got.lock.Token() == 0 {
				t.Error("the token is 0")
			}
			if err := fenced(t, db, got.lock).Rollback(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Two callers who would share the lock leave one after the other, so that its grant is
// twice in the way of a try that wants it alone.
func TestAdvisoryTryPassesALeftoverOfAnotherMode(t *testing.T) {
	t.Parallel()
	locks, a := advisoryWire(t, pgtest.New(t).Pool, nil)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	answer := func() {
		t.Helper()
		if err := a.wire.conn.receive(&a.wire.message); err != nil {
			t.Fatal(err)
		}
		a.wire.answered()
	}
	_ = stall(a.wire)
	first := acquiring(ctx, locks, "k", Shared)
	queued(t, a.wire, 2)
	if err := a.wire.begin(); err != nil {
		t.Fatal(err)
	}
	try := acquiring(t.Context(), locks, "k", NoWait)
	queued(t, a.wire, 1)
	leave()
	<-first
	answer()
	ctx, leave = context.WithCancel(t.Context())
	defer leave()
	second := acquiring(ctx, locks, "k", Shared)
	queued(t, a.wire, 1)
	answer()
	queued(t, a.wire, 1) // the try is refused by what nobody has, and asks again
	leave()
	<-second
	answer()
	answer()
	a.wire.pass()
	if got := <-try; got.err != nil {
		t.Errorf("nobody has the key: %v", got.err)
	}
}

func TestALockerReapsWhatDeadSessionsLeftAndNothingOfItsOwn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	locks, a := advisoryWire(t, db.Pool, &AdvisoryConfig{Tokens: true})
	lock, err := locks.TryAcquire(t.Context(), "held")
	if err != nil {
		t.Fatal(err)
	}
	dead, d := advisoryWire(t, db.Pool, &AdvisoryConfig{Tokens: true})
	if _, err := dead.TryAcquire(t.Context(), "left"); err != nil {
		t.Fatal(err)
	}
	var ended bool
	if err := db.Pool.QueryRow(t.Context(), "select pg_terminate_backend($1, 10000)", d.pid).Scan(&ended); err != nil || !ended {
		t.Fatal(ended, err)
	}
	if err := a.reap(); err != nil {
		t.Fatal(err)
	}
	rows, _ := db.Pool.Query(t.Context(), "select key_id from pgxlock_advisory_locks")
	if keys, err := pgx.CollectRows(rows, pgx.RowTo[int64]); err != nil || len(keys) != 1 || keys[0] != AdvisoryID("held") {
		t.Errorf("the rows that are left are of %d, %v", keys, err)
	}
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return lock.Fence(t.Context(), tx) })
	if err != nil {
		t.Error(err)
	}
}
