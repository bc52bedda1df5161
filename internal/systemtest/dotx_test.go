package systemtest_test

import (
	"context"
	"database/sql"
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// wantWritten checks how many rows were committed, and that neither the lease nor
// a connection of the pool is held any more.
func wantWritten(t *testing.T, db *pgtest.DB, want int) {
	t.Helper()
	if n := testkit.Query[int](t, db, "select count(*) from ledger"); n != want {
		t.Errorf("%d rows were committed, want %d", n, want)
	}
	untilOnlyHeld(t, db)
	pgtest.Until(t, "the pool has its connections back", func() bool { return db.Pool.Stat().AcquiredConns() == 0 })
}

func TestDoTxCommitsUnderTheFenceAndReleases(t *testing.T) {
	t.Parallel()
	db := testkit.WithLedger(t)
	locks, others := testkit.NewLocker(t, db, nil), testkit.NewLocker(t, db, nil)
	err := locks.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
		if got := testkit.Rows(t, db); len(got) != 1 || got["k"] != lock.Holder() || lock.Token() == 0 || lock.Key() != "k" {
			t.Errorf("held: %v", got)
		}
		if !testkit.Query[bool](t, db, "select metadata = '\"pod-7\"' from distributed_locks") {
			t.Error("the options of the lease were not passed on")
		}
		if _, err := others.TryAcquire(ctx, "k"); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("somebody else: %v", err)
		}
		if _, err := locks.TryAcquire(ctx, "k"); !errors.Is(err, pgxlock.ErrDeadlock) {
			t.Errorf("the context does not come from the lock: %v", err)
		}
		// The fence has come already: without it this would release.
		_, err := db.Pool.Exec(ctx, "select release_lock($1, $2)", lock.Key(), lock.Holder())
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "55P03" {
			t.Errorf("released under the transaction: %v", err)
		}
		return testkit.WriteRow(ctx, tx)
	}, pgxlock.Metadata("pod-7"), pgxlock.TTL(time.Hour), pgxlock.MaxWait(pgtest.Patience))
	if err != nil {
		t.Error(err)
	}
	wantWritten(t, db, 1)

	held := testkit.Acquire(t, others, "k")
	err = locks.DoTx(t.Context(), db.Pool, "k", func(context.Context, pgx.Tx, *pgxlock.Lock) error {
		t.Error("called without the lock")
		return nil
	}, pgxlock.NoWait)
	busy, ok := errors.AsType[*pgxlock.Error](err)
	if !ok || !errors.Is(err, pgxlock.ErrNotAcquired) || busy.Op != "acquire" || busy.Holder != held.Holder() {
		t.Errorf("a busy key: %v", err)
	}
}

func TestDoTxRollsBackWhatFails(t *testing.T) {
	t.Parallel()
	db := testkit.WithLedger(t)
	locks := testkit.NewLocker(t, db, nil)
	oops := errors.New("oops")
	err := locks.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error {
		return errors.Join(testkit.WriteRow(ctx, tx), oops)
	})
	if !errors.Is(err, oops) {
		t.Errorf("%v, want the error of fn", err)
	}
	wantWritten(t, db, 0)

	err = locks.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error {
		if err := testkit.WriteRow(ctx, tx); err != nil {
			return err
		}
		return oops
	})
	if err != oops { //nolint:errorlint // the very same
		t.Errorf("%v, want the error of fn as it is", err)
	}
	wantWritten(t, db, 0)

	// A function that ignores the error of a statement gets an error: the server rolls back
	// what was to be committed.
	err = locks.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error {
		_ = testkit.WriteRow(ctx, tx)
		_, _ = tx.Exec(ctx, "select 1/0")
		return nil
	})
	if !errors.Is(err, pgx.ErrTxCommitRollback) {
		t.Errorf("an aborted transaction: %v, want ErrTxCommitRollback", err)
	}
	wantOneLine(t, err, "commit", `"k"`)
	wantWritten(t, db, 0)
	t.Run("DoSQLTx", func(t *testing.T) { doSQLTxRollsBackWhatFails(t, db, locks) })
}

func doSQLTxRollsBackWhatFails(t *testing.T, db *pgtest.DB, locks *pgxlock.Locker) {
	t.Helper()
	handle := stdlib.OpenDBFromPool(db.Pool)
	defer handle.Close()
	begin := func(ctx context.Context) (*sql.Tx, error) { return handle.BeginTx(ctx, nil) }
	write := func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "insert into ledger default values")
		return err
	}
	oops := errors.New("oops")
	for what, test := range map[string]struct {
		then func(ctx context.Context, tx *sql.Tx, lock *pgxlock.Lock) error
		want error
	}{
		"an error":       {func(context.Context, *sql.Tx, *pgxlock.Lock) error { return oops }, oops},
		"its own commit": {func(_ context.Context, tx *sql.Tx, _ *pgxlock.Lock) error { return tx.Rollback() }, sql.ErrTxDone},
		"an aborted tx": {func(ctx context.Context, tx *sql.Tx, _ *pgxlock.Lock) error {
			_, _ = tx.ExecContext(ctx, "select 1/0")
			return nil
		}, pgx.ErrTxCommitRollback},
	} {
		err := pgxlock.DoSQLTx(t.Context(), locks, "k", begin, func(ctx context.Context, tx *sql.Tx, lock *pgxlock.Lock) error {
			return errors.Join(write(ctx, tx), test.then(ctx, tx, lock))
		})
		if !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", what, err, test.want)
		}
		wantWritten(t, db, 0)
	}
	for says, err := range map[string]error{
		"begin is nil": pgxlock.DoSQLTx(t.Context(), locks, "k", nil, func(context.Context, *sql.Tx, *pgxlock.Lock) error { return nil }),
		"fn is nil":    pgxlock.DoSQLTx(t.Context(), locks, "k", begin, nil),
		"begin returned neither": pgxlock.DoSQLTx(t.Context(), locks, "k", func(context.Context) (*sql.Tx, error) { return nil, nil }, //nolint:nilnil // what is refused
			func(context.Context, *sql.Tx, *pgxlock.Lock) error { return nil }),
		"oops": pgxlock.DoSQLTx(t.Context(), locks, "k", func(context.Context) (*sql.Tx, error) { return nil, oops },
			func(context.Context, *sql.Tx, *pgxlock.Lock) error { return nil }),
	} {
		wantOneLine(t, err, says)
	}
	func() {
		defer func() { _ = recover() }()
		_ = pgxlock.DoSQLTx(t.Context(), locks, "k", begin, func(ctx context.Context, tx *sql.Tx, _ *pgxlock.Lock) error {
			_ = write(ctx, tx)
			panic("oops")
		})
	}()
	wantWritten(t, db, 0)

	err := pgxlock.DoSQLTx(t.Context(), locks, "k", func(ctx context.Context) (*sql.Tx, error) {
		db.Exec(t, "delete from distributed_locks")
		return begin(ctx)
	}, func(ctx context.Context, tx *sql.Tx, _ *pgxlock.Lock) error { return write(ctx, tx) })
	if !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("without the lease: %v, want ErrLost", err)
	}
	wantWritten(t, db, 0)

	// A lock that is lost while begin waits for a connection ends the wait.
	err = pgxlock.DoSQLTx(t.Context(), locks, "k", func(ctx context.Context) (*sql.Tx, error) {
		db.Exec(t, "delete from distributed_locks") // the next renewal notices
		<-ctx.Done()
		return nil, ctx.Err()
	}, func(context.Context, *sql.Tx, *pgxlock.Lock) error { return nil }, pgxlock.TTL(time.Second))
	if !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("%v, want ErrLost", err)
	}

	tries := 0
	err = pgxlock.DoSQLTx(t.Context(), locks, "k", begin, func(ctx context.Context, tx *sql.Tx, _ *pgxlock.Lock) error {
		if tries++; tries == 1 {
			_, err := tx.ExecContext(ctx, "do $$ begin raise serialization_failure; end $$")
			return err
		}
		return write(ctx, tx)
	}, pgxlock.Retries(1), pgxlock.MaxWait(pgtest.Patience))
	if err != nil || tries != 2 {
		t.Errorf("after %d tries: %v", tries, err)
	}
	wantWritten(t, db, 1)
}

func TestFenceSaysOnceWhatToDo(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.WithLedger(t)
	err := testkit.NewLocker(t, db, nil).DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
		_, _ = tx.Exec(ctx, "select 1/0")
		return lock.Fence(ctx, tx)
	})
	wantServerError(t, err, "25P02")
	if n := strings.Count(err.Error(), "roll back"); n != 1 {
		t.Errorf("%d times: %v", n, err)
	}
}

func TestDoTxCleansUpAfterAPanic(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.WithLedger(t)
	one := testkit.Roomy(t, db, 1) // a connection that does not come back is missed
	locks := testkit.NewLocker(t, db, nil)
	for name, end := range map[string]func(){
		"panic":  func() { panic("oops") },
		"Goexit": runtime.Goexit,
	} {
		for range 3 {
			var recovered any
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				defer func() { recovered = recover() }()
				err := locks.DoTx(t.Context(), one.Pool, "k", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error {
					if err := testkit.WriteRow(ctx, tx); err != nil {
						t.Error(err)
					}
					end()
					return nil
				})
				t.Errorf("%s: DoTx returned %v", name, err)
			}()
			<-ended
			if name == "panic" && recovered != "oops" {
				t.Errorf("the panic came out as %v", recovered)
			}
			wantWritten(t, db, 0)
			pgtest.Until(t, "the pool has its connection back", func() bool { return one.Pool.Stat().AcquiredConns() == 0 })
		}
	}
	pgtest.Until(t, "no transaction is open", func() bool { // the server learns of a connection that was closed a little later
		return testkit.Query[int](t, db, "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'") == 0
	})
	if err := locks.DoTx(t.Context(), one.Pool, "k", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error { return testkit.WriteRow(ctx, tx) }); err != nil {
		t.Error(err)
	}
	wantWritten(t, db, 1)
}

const beginSQL = "begin" // what pgx sends

func TestLockThatIsLostBeforeTheFenceWritesNothing(t *testing.T) {
	t.Parallel()
	const expires = "it was not renewed, and taken over"
	for name, lose := range map[string]func(t *testing.T, db *pgtest.DB, p *testkit.Proxy){
		"its row was deleted": func(t *testing.T, db *pgtest.DB, _ *testkit.Proxy) { db.Exec(t, "delete from distributed_locks") },
		"somebody else has it": func(t *testing.T, db *pgtest.DB, _ *testkit.Proxy) {
			db.Exec(t, "update distributed_locks set holder_id = 'somebody else', fencing_token = fencing_token + 1")
		},
		expires: func(t *testing.T, db *pgtest.DB, p *testkit.Proxy) {
			p.Refuse()
			p.Cut()
			pgtest.Until(t, "somebody else has got it", func() bool {
				return testkit.Query[bool](t, db, "select acquire_lock('k', 'somebody else', 3600)")
			})
		},
	} {
		if name != "somebody else has it" && testing.Short() {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testkit.WithLedger(t)
			p, through := testkit.Proxied(t, db)
			t.Cleanup(p.Heal) // so that the Locker can close
			locks := testkit.NewLocker(t, through, nil)
			ttl := pgxlock.TTL(time.Hour)
			if name == expires {
				ttl = pgxlock.TTL(2 * time.Second)
			}
			calls := 0
			pool := db.NewPool(t, func(c *pgxpool.Config) {
				c.ConnConfig.Tracer = testkit.OnStatement(beginSQL, func() { calls++; lose(t, db, p) })
			})
			var err error
			for begun := false; !begun; begun = calls > 0 || name != expires { // again where this machine stands still until the lease is over
				err = locks.DoTx(t.Context(), pool, "k", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error {
					t.Error("fn was called")
					return testkit.WriteRow(ctx, tx)
				}, ttl, pgxlock.Retries(10))
			}
			if !errors.Is(err, pgxlock.ErrLost) || errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("%v, want ErrLost", err)
			}
			wantOneLine(t, err, `"k"`)
			if calls != 1 {
				t.Errorf("%d transactions were begun; a lock that is lost is no reason to try again", calls)
			}
			if n := testkit.Query[int](t, db, "select count(*) from ledger"); n != 0 {
				t.Errorf("%d rows were committed", n)
			}
			pgtest.Until(t, "the pool has its connections back", func() bool { return pool.Stat().AcquiredConns() == 0 })
			if got := testkit.Rows(t, db); got["k"] != "somebody else" && len(got) > 0 {
				t.Errorf("held: %v", got)
			}
		})
	}
}

// fencedInTime is DoTx under a short lease, again where this machine stands still until it is
// over before it is fenced.
func fencedInTime(t *testing.T, locks *pgxlock.Locker, db *pgtest.DB, fn func(context.Context, pgx.Tx, *pgxlock.Lock) error) (err error) {
	t.Helper()
	for fenced := false; !fenced; {
		err = locks.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
			fenced = true
			return fn(ctx, tx, lock)
		}, pgxlock.TTL(2*time.Second))
		if !fenced && !errors.Is(err, pgxlock.ErrLost) && !errors.Is(err, pgxlock.ErrUnavailable) {
			t.Fatal(err)
		}
	}
	return err
}

func TestLockThatIsLostAfterTheFenceStillCommits(t *testing.T) {
	t.Parallel()
	db := testkit.WithLedger(t)
	p, through := testkit.Proxied(t, db)
	t.Cleanup(p.Heal)
	locks, others := testkit.NewLocker(t, through, nil), testkit.NewLocker(t, db, nil)
	waiting := make(chan error, 1)
	seen := 0
	err := fencedInTime(t, locks, db, func(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
		p.Refuse() // no renewal any more
		p.Cut()
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), pgxlock.ErrLost) || !errors.Is(lock.Err(), pgxlock.ErrLost) {
			t.Errorf("%v, %v; want ErrLost", context.Cause(ctx), lock.Err())
		}
		pgtest.Until(t, "the lease has expired", func() bool {
			return testkit.Query[bool](t, db, "select expires_at < clock_timestamp() from distributed_locks")
		})
		if _, err := others.TryAcquire(t.Context(), "k"); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("somebody else got it before the commit: %v", err)
		}
		go func() {
			next, err := others.Acquire(t.Context(), "k", pgxlock.MaxWait(pgtest.Patience))
			if err == nil {
				err = db.Pool.QueryRow(t.Context(), "select count(*) from ledger").Scan(&seen)
				err = errors.Join(err, next.Release(t.Context()))
			}
			waiting <- err
		}()
		return testkit.WriteRow(context.WithoutCancel(ctx), tx)
	})
	if err != nil {
		t.Errorf("the fence was in time: %v", err)
	}
	if err := <-waiting; err != nil {
		t.Error(err)
	}
	if seen != 1 {
		t.Errorf("the next holder saw %d rows", seen)
	}
	wantWritten(t, db, 1)
}

// The Locker cannot give the lease back, which is no reason to say that what was
// committed was not.
func TestDoTxReturnsNilOnceItHasCommitted(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.WithLedger(t)
	p, through := testkit.Proxied(t, db)
	t.Cleanup(p.Heal)
	locks := testkit.NewLocker(t, through, nil)
	err := fencedInTime(t, locks, db, func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error {
		p.Refuse()
		p.Cut()
		return testkit.WriteRow(context.WithoutCancel(ctx), tx) // the lease may be over by now
	})
	if err != nil {
		t.Error(err)
	}
	if n := testkit.Query[int](t, db, "select count(*) from ledger"); n != 1 {
		t.Errorf("%d rows were committed", n)
	}
}

func TestDoTxBeginsAnewOnlyIfItIsTold(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.WithLedger(t)
	db.Exec(t, "create table counter (n int); insert into counter values (0)")
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Backoff: func(int) time.Duration { return time.Millisecond }})
	// conflict reads, has somebody else write, and writes: 40001.
	conflict := func(ctx context.Context, tx pgx.Tx) error {
		var n int
		if err := tx.QueryRow(ctx, "select n from counter").Scan(&n); err != nil {
			return err
		}
		if _, err := db.Pool.Exec(ctx, "update counter set n = n + 1"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "update counter set n = n + 100")
		return err
	}
	// stale makes the snapshot older than a lock: ErrStaleSnapshot.
	stale := func(ctx context.Context, tx pgx.Tx) error {
		if _, err := db.Pool.Exec(ctx, "update counter set n = n"); err != nil {
			return err
		}
		return pgxlock.LockTx(ctx, tx, "other")
	}
	deadlock := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "do $$begin raise 'a deadlock' using errcode = '40P01'; end$$")
		return err
	}
	type outcome struct {
		attempts int
		err      bool
	}
	for name, test := range map[string]struct {
		fails func(context.Context, pgx.Tx) error
		times int
		opts  []pgxlock.DoTxOption
		want  outcome
	}{
		"40001, by default":            {conflict, 1, nil, outcome{1, true}},
		"40001, once":                  {conflict, 1, []pgxlock.DoTxOption{pgxlock.Retries(1)}, outcome{2, false}},
		"40001, three times of two":    {conflict, 3, []pgxlock.DoTxOption{pgxlock.Retries(2)}, outcome{3, true}},
		"40001, three times":           {conflict, 3, []pgxlock.DoTxOption{pgxlock.Retries(5)}, outcome{4, false}},
		"a stale snapshot, by default": {stale, 1, []pgxlock.DoTxOption{pgxlock.Retries(0)}, outcome{1, true}},
		"a stale snapshot":             {stale, 2, []pgxlock.DoTxOption{pgxlock.Retries(2)}, outcome{3, false}},
		"a deadlock":                   {deadlock, 1, []pgxlock.DoTxOption{pgxlock.Retries(1)}, outcome{2, false}},
		"another error": {func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select 1/0")
			return err
		}, 1, []pgxlock.DoTxOption{pgxlock.Retries(5)}, outcome{1, true}},
		"an error of fn's own": {func(context.Context, pgx.Tx) error { return errors.New("oops") }, 1, []pgxlock.DoTxOption{pgxlock.Retries(5)}, outcome{1, true}},
	} {
		before := testkit.Query[int](t, db, "select count(*) from ledger")
		tokens := make(map[int64]bool)
		var got outcome
		opts := append(test.opts, pgxlock.TxOptions{IsoLevel: pgx.Serializable})
		err := locks.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
			tokens[lock.Token()] = true
			var level string
			if err := tx.QueryRow(ctx, "select current_setting('transaction_isolation')").Scan(&level); err != nil || level != "serializable" {
				t.Errorf("%s: TxOptions had no effect: %q, %v", name, level, err)
			}
			if got.attempts++; got.attempts <= test.times {
				return errors.Join(testkit.WriteRow(ctx, tx), test.fails(ctx, tx))
			}
			return testkit.WriteRow(ctx, tx)
		}, opts...)
		if got.err = err != nil; got != test.want {
			t.Errorf("%s: %+v, want %+v: %v", name, got, test.want, err)
		}
		if len(tokens) != 1 {
			t.Errorf("%s: tokens %v, want one", name, tokens)
		}
		want := before + 1
		if test.want.err {
			want--
		}
		wantWritten(t, db, want)
	}
}

// SERIALIZABLE may find out as late as in the commit.
func TestDoTxBeginsAnewWhenTheCommitFails(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.WithLedger(t)
	db.Exec(t, "create table doctors (name text, on_call bool); insert into doctors values ('a', true), ('b', true)")
	locks := testkit.NewLocker(t, db, nil)
	attempts := 0
	err := locks.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error {
		attempts++
		var n int
		if err := tx.QueryRow(ctx, "select count(*) from doctors where on_call").Scan(&n); err != nil {
			return err
		}
		if n < 2 {
			return testkit.WriteRow(ctx, tx)
		}
		if _, err := tx.Exec(ctx, "update doctors set on_call = false where name = 'a'"); err != nil {
			return err
		}
		return pgx.BeginTxFunc(ctx, db.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(other pgx.Tx) error {
			_, err := other.Exec(ctx, "update doctors set on_call = false where name = 'b' and (select count(*) from doctors where on_call) = 2")
			return err
		})
	}, pgxlock.TxOptions{IsoLevel: pgx.Serializable}, pgxlock.Retries(3))
	if err != nil || attempts != 2 {
		t.Errorf("%d attempts: %v", attempts, err)
	}
	if n := testkit.Query[int](t, db, "select count(*) from doctors where on_call"); n != 1 {
		t.Errorf("%d are on call, want 1", n)
	}
	wantWritten(t, db, 1)
}

func TestDoTxCommitsNothingOnceItsContextHasEnded(t *testing.T) {
	t.Parallel()
	db := testkit.WithLedger(t)
	locks := testkit.NewLocker(t, db, nil)
	why := errors.New("the user has left")
	one := testkit.Roomy(t, db, 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	err := locks.DoTx(ctx, one.Pool, "k", func(work context.Context, tx pgx.Tx, _ *pgxlock.Lock) error {
		err := testkit.WriteRow(work, tx)
		cancel(why)
		<-work.Done()
		return err
	}, pgxlock.Retries(3))
	if !errors.Is(err, context.Canceled) || !errors.Is(err, why) || errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("%v, want context.Canceled and its cause", err)
	}
	wantOneLine(t, err, "commit", `"k"`)
	wantWritten(t, db, 0)

	// Its connection was not lost for that.
	if err := one.Pool.Ping(t.Context()); err != nil {
		t.Error(err)
	}
	if n := one.Pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d connections were made, want 1", n)
	}
	err = locks.DoTx(ctx, db.Pool, "k", func(context.Context, pgx.Tx, *pgxlock.Lock) error {
		t.Error("called although the context has ended")
		return nil
	})
	if !errors.Is(err, context.Canceled) || errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("%v, want context.Canceled", err)
	}
}

func TestSoakTwoDoTxOnOneKeyNeverOverlap(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const workers = 4
	db := testkit.Roomy(t, testkit.WithLedger(t), workers+2)
	db.Exec(t, "create table counter (n int); insert into counter values (0)")
	each := pgtest.Soak(t, 15, 500)
	var inside atomic.Int32
	var working sync.WaitGroup
	for worker := range workers {
		locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Backoff: func(int) time.Duration { return time.Millisecond }})
		working.Go(func() {
			for range each {
				began := false
				work := func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error {
					began = true
					if inside.Add(1) != 1 {
						t.Error("two at once")
					}
					defer inside.Add(-1)
					// A lost update, if another one reads before we commit.
					var n int
					if err := tx.QueryRow(ctx, "select n from counter").Scan(&n); err != nil {
						return err
					}
					_, err := tx.Exec(ctx, "update counter set n = $1", n+1)
					return err
				}
				err := locks.DoTx(t.Context(), db.Pool, "k", work)
				for !began && errors.Is(err, pgxlock.ErrUnavailable) { // a machine that is very busy may not connect in time
					err = locks.DoTx(t.Context(), db.Pool, "k", work)
				}
				if err != nil {
					t.Errorf("worker %d: %v", worker, err)
				}
			}
		})
	}
	working.Wait()
	if n := testkit.Query[int](t, db, "select n from counter"); n != workers*each {
		t.Errorf("%d updates were lost", workers*each-n)
	}
	wantWritten(t, db, 0)
}

func TestBadArgumentsOfDoTxAreNamed(t *testing.T) {
	t.Parallel()
	pool := unconnected(t)
	locks, err := pgxlock.NewLeaseLocker(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	work := func(context.Context, pgx.Tx, *pgxlock.Lock) error {
		t.Error("the work was called")
		return nil
	}
	wantRefused(t, locks.DoTx(t.Context(), nil, "k", work), "do", "the pool is nil")
	wantRefused(t, locks.DoTx(t.Context(), pool, "k", nil), "do", "fn is nil")
	wantRefused(t, locks.DoTx(t.Context(), pool, "k", work, pgxlock.Retries(-1)), "do", "Retries is -1")
	wantRefused(t, locks.DoTx(t.Context(), pool, "k", work, pgxlock.TTL(1)), "acquire", "TTL is")
	wantRefused(t, locks.DoTx(t.Context(), pool, "", work), "acquire", "the key is empty")
	wantRefused(t, locks.DoTx(t.Context(), pool, "a\x00", work), "acquire", "zero byte")
	wantRefused(t, locks.DoTx(t.Context(), pool, "k", work, nil), "do", "an option is nil")
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := locks.DoTx(t.Context(), pool, "k", work); !errors.Is(err, pgxlock.ErrClosed) {
		t.Errorf("a closed Locker: %v", err)
	}
}

func TestFenceOnAnotherDatabaseNamesBoth(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db, empty, other := testkit.Migrated(t), pgtest.New(t), testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, nil)
	lock := testkit.Acquire(t, locks, "k")
	elsewhere := pgtest.Private(t, pgserver.Config{})
	server := &pgtest.DB{Pool: pgtest.Pool(t, elsewhere.URL("postgres")), URL: elsewhere.URL("postgres"), Name: "postgres"}
	for wrong, want := range map[*pgtest.DB]error{empty: pgxlock.ErrSchema, other: pgxlock.ErrLost, server: pgxlock.ErrSchema} {
		tx := testkit.Begin(t, wrong, pgx.TxOptions{})
		err := lock.Fence(t.Context(), tx)
		if !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
		wantOneLine(t, err, "fence", `"k"`, db.Name, wrong.Name)
		testkit.Rollback(t, tx)

		err = locks.DoTx(t.Context(), wrong.Pool, "in one call", func(context.Context, pgx.Tx, *pgxlock.Lock) error {
			t.Error("fn was called")
			return nil
		})
		if !errors.Is(err, want) || !strings.Contains(err.Error(), wrong.Name) {
			t.Errorf("DoTx: %v, want %v", err, want)
		}
	}
	// The lock itself is none the worse.
	if err := errors.Join(lock.Renew(t.Context()), lock.Err()); err != nil {
		t.Error(err)
	}
	if err := lock.Fence(t.Context(), testkit.Begin(t, db, pgx.TxOptions{})); err != nil {
		t.Error(err)
	}
}

func TestFenceInTheRightDatabaseBlamesNoOther(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	err := lock.Fence(t.Context(), testkit.Begin(t, db, pgx.TxOptions{AccessMode: pgx.ReadOnly}))
	if !errors.Is(err, pgxlock.ErrReadOnly) || strings.Contains(err.Error(), db.Name) {
		t.Errorf("%v, want ErrReadOnly", err)
	}
	db.Exec(t, "delete from distributed_locks")
	err = lock.Fence(t.Context(), testkit.Begin(t, db, pgx.TxOptions{}))
	if !errors.Is(err, pgxlock.ErrLost) || strings.Contains(err.Error(), "tx is on database") {
		t.Errorf("%v, want ErrLost", err)
	}
}
