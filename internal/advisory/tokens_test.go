package advisory

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// migrated are databases with pgxlock in them.
var migrated = pgtest.NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error { return migrations.Up(ctx, pool, nil) })

// withTokens returns a connected process with Tokens, and its database.
func withTokens(t *testing.T) (*pgtest.DB, *process) {
	t.Helper()
	db := migrated.New(t)
	return db, connected(t, db.Pool, Config{Tokens: true})
}

// behind starts one call for k, and another one, by ask, while the request of the first is in
// flight. It returns when the first has its answer: the second one has none before the
// test calls p.mux.pass. If left is true, the first caller leaves before its answer.
func behind(t *testing.T, p *process, left bool, mode hold.Mode, ask func(context.Context, *process, string, hold.Mode) <-chan tried) (got tried, next <-chan tried) {
	t.Helper()
	_ = stall(p.mux)
	ctx, leave := context.WithCancel(t.Context())
	t.Cleanup(leave)
	ahead := acquiring(ctx, p, "k", mode)
	queued(t, p.mux, 2)
	send(t, p.mux)
	next = ask(t.Context(), p, "k", mode)
	queued(t, p.mux, 1)
	if left {
		leave()
		got = <-ahead
	}
	receive(t, p.mux)
	p.mux.answered()
	if !left {
		got = <-ahead
	}
	return got, next
}

func fenced(t *testing.T, db *pgtest.DB, lock held) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if err := lock.fence(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	return tx
}

// releasing releases beside the test, and returns when the release is in the queue.
func releasing(t *testing.T, lock held) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- lock.release() }()
	queued(t, lock.process.mux, 1)
	return done
}

func TestAdvisoryHandoverDrawsATokenAndWaitsForTheFencedTransaction(t *testing.T) {
	t.Parallel()
	for name, tries := range rows(map[string]bool{"a try": true, "a wait": false}, "a try") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, p := withTokens(t)
			ask := acquiring
			if tries {
				ask = trying
			}
			got, next := behind(t, p, false, hold.Exclusive, ask)
			if got.err != nil {
				t.Fatal(got.err)
			}
			tx := fenced(t, db, got.lock)
			released := releasing(t, got.lock)
			p.mux.pass()
			if err := <-released; err != nil {
				t.Error(err)
			}
			if tries {
				if second := <-next; !errors.Is(second.err, lockerr.ErrNotAcquired) {
					t.Fatalf("a grant beside an open fenced transaction: %+v", second)
				}
				next = acquiring(t.Context(), p, "k", hold.Exclusive)
			}
			// Once refused it waits; the server sees this query after that refusal.
			var row bool
			const fence = "select exists (select from pgxlock_advisory_locks where key_id = $1 and token is null)"
			if err := db.Pool.QueryRow(t.Context(), fence, numberOf("k")).Scan(&row); err != nil || !row {
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
			if second.lock.Token <= got.lock.Token {
				t.Errorf("token %d after %d", second.lock.Token, got.lock.Token)
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
	for name, mode := range rows(map[string]hold.Mode{"exclusive": hold.Exclusive, "shared": hold.Shared}, "exclusive") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, p := withTokens(t)
			_, next := behind(t, p, true, mode, trying)
			p.mux.pass()
			got := <-next
			if got.err != nil {
				t.Fatal(got.err)
			}
			if got.lock.Token == 0 {
				t.Error("the token is 0")
			}
			if err := fenced(t, db, got.lock).Rollback(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Two callers that ask for the lock shared leave one after the other, so that its grant is
// twice in the way of an exclusive try.
func TestAdvisoryTryPassesALeftoverOfAnotherMode(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	answer := func() {
		t.Helper()
		receive(t, p.mux)
		p.mux.answered()
	}
	_ = stall(p.mux)
	first := acquiring(ctx, p, "k", hold.Shared)
	queued(t, p.mux, 2)
	send(t, p.mux)
	try := trying(t.Context(), p, "k", hold.Exclusive)
	queued(t, p.mux, 1)
	leave()
	<-first
	answer()
	ctx, leave = context.WithCancel(t.Context())
	defer leave()
	second := acquiring(ctx, p, "k", hold.Shared)
	queued(t, p.mux, 1)
	answer()
	queued(t, p.mux, 1) // the try is refused by what nobody has, and asks again
	leave()
	<-second
	answer()
	answer()
	p.mux.pass()
	if got := <-try; got.err != nil {
		t.Errorf("nobody has the key: %v", got.err)
	}
}

func TestLockerReapsWhatDeadSessionsLeftAndNothingOfItsOwn(t *testing.T) {
	t.Parallel()
	db := migrated.New(t)
	p := connected(t, db.Pool, Config{Tokens: true})
	lock, err := p.try(t.Context(), "held", hold.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	dead := connected(t, db.Pool, Config{Tokens: true})
	if _, err := dead.try(t.Context(), "left", hold.Exclusive); err != nil {
		t.Fatal(err)
	}
	var ended bool
	if err := db.Pool.QueryRow(t.Context(), "select pg_terminate_backend($1, 10000)", dead.pid).Scan(&ended); err != nil || !ended {
		t.Fatal(ended, err)
	}
	if err := p.reap(); err != nil {
		t.Fatal(err)
	}
	rows, _ := db.Pool.Query(t.Context(), "select key_id from pgxlock_advisory_locks")
	if keys, err := pgx.CollectRows(rows, pgx.RowTo[int64]); err != nil || len(keys) != 1 || keys[0] != numberOf("held") {
		t.Errorf("the rows that are left are of %d, %v", keys, err)
	}
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return lock.fence(t.Context(), tx) })
	if err != nil {
		t.Error(err)
	}
}
