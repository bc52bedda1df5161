package pgxlock_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver/choose"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// TestIntegration runs the main job from end to end on the server that the other tests use.
// make test-integration runs it on one in a container, through testcontainers-go, where there
// are an engine and an image, and says which it was.
func TestIntegration(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if os.Getenv(choose.ContainerEnv) == "1" {
		inContainer(t, db)
	}
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, "create table ledger (n bigint generated always as identity primary key, token bigint not null)")

	t.Run("workers take turns under one lease and their tokens grow", func(t *testing.T) {
		var inside atomic.Int32
		var workers sync.WaitGroup
		for range 4 {
			locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: 10 * time.Second})
			workers.Go(func() {
				for range 5 {
					err := locks.Do(t.Context(), "ledger", func(ctx context.Context, lock *pgxlock.Lock) error {
						if inside.Add(1) != 1 {
							t.Error("two workers at once")
						}
						defer inside.Add(-1)
						return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
							if err := lock.Fence(ctx, tx); err != nil {
								return err
							}
							_, err := tx.Exec(ctx, "insert into ledger (token) values ($1)", lock.Token())
							return err
						})
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		workers.Wait()
		var rows, disorder int
		const check = `select count(*), count(*) filter (where token <= before)
			from (select token, lag(token) over (order by n) as before from ledger) x`
		if err := db.Pool.QueryRow(t.Context(), check).Scan(&rows, &disorder); err != nil {
			t.Fatal(err)
		}
		if rows != 20 || disorder != 0 {
			t.Errorf("%d rows, %d of them with a token that does not grow", rows, disorder)
		}
	})

	t.Run("an expired holder is taken over and its fenced write refused", func(t *testing.T) {
		first, second := testkit.NewLocker(t, db, nil), testkit.NewLocker(t, db, nil)
		late, err := first.Acquire(t.Context(), "invoice:42")
		if err != nil {
			t.Fatal(err)
		}
		db.Exec(t, "update distributed_locks set expires_at = clock_timestamp() where lock_name = 'invoice:42'")
		next, err := second.Acquire(t.Context(), "invoice:42", pgxlock.MaxWait(10*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		if next.Token() <= late.Token() {
			t.Errorf("token %d after %d", next.Token(), late.Token())
		}
		err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "insert into ledger (token) values ($1)", late.Token()); err != nil {
				return err
			}
			return late.Fence(t.Context(), tx)
		})
		if !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("the late holder's fence: %v", err)
		}
		if err := late.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("the late holder's release: %v", err)
		}
		if err := next.Err(); err != nil {
			t.Errorf("the next holder: %v", err)
		}
	})

	t.Run("SQL callers and Go callers exclude each other", func(t *testing.T) {
		locks := testkit.NewLocker(t, db, nil)
		sql := func(call string) (ok bool) {
			t.Helper()
			if err := db.Pool.QueryRow(t.Context(), "select "+call).Scan(&ok); err != nil {
				t.Fatal(err)
			}
			return ok
		}
		if !sql("acquire_lock('nightly', 'psql')") {
			t.Error("a free lease was refused to SQL")
		}
		_, err := locks.TryAcquire(t.Context(), "nightly")
		if e, ok := errors.AsType[*pgxlock.Error](err); !ok || !errors.Is(err, pgxlock.ErrNotAcquired) || e.Holder != "psql" {
			t.Errorf("a lease that SQL holds: %v", err)
		}
		if !sql("release_lock('nightly', 'psql')") {
			t.Error("SQL could not release its lease")
		}
		lock, err := locks.TryAcquire(t.Context(), "nightly")
		if err != nil {
			t.Fatal(err)
		}
		if sql("acquire_lock('nightly', 'psql')") {
			t.Error("SQL got a lease that Go holds")
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// inContainer fails the test unless its server can be one in a container: those of this
// machine's programs are reached by a socket.
func inContainer(t *testing.T, db *pgtest.DB) {
	t.Helper()
	var byTCP bool
	if err := db.Pool.QueryRow(t.Context(), "select inet_server_addr() is not null").Scan(&byTCP); err != nil {
		t.Fatal(err)
	}
	if !byTCP {
		t.Error("the server is reached by a socket, so that it does not run in a container")
	}
}
