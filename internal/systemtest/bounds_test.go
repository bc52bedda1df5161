package systemtest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"iter"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// A boundedCall is one public call that may wait for the server. Its bound stands in docs/waiting.md, in the
// row that has all its words, in the column of its kind.
type boundedCall struct {
	words string
	kind  pgxlock.Kind
	call  func(context.Context) error
}

// bounds reads the table of docs/waiting.md: by the words of a row's calls, the bound of each kind of
// Locker; 0 is the end of the call's context.
func bounds(t *testing.T) func(c boundedCall) time.Duration {
	t.Helper()
	text, err := os.ReadFile("../../docs/waiting.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`(?m)^\| (.*) \| (.*) \| (.*) \|$`)
	quoted := regexp.MustCompile("`([^`]+)`")
	_, section, _ := strings.Cut(string(text), "## How long a call waits\n")
	section, _, _ = strings.Cut(section, "\n## ")
	found := make(map[string][2]time.Duration)
	for _, cells := range row.FindAllStringSubmatch(section, -1) {
		var most [2]time.Duration
		for i, cell := range cells[2:] {
			if cell == "its end" || cell == "`MaxWait`" {
				continue
			}
			if most[i], err = time.ParseDuration(strings.ReplaceAll(cell, " ", "")); err != nil {
				break // the head of the table
			}
		}
		if err != nil {
			continue
		}
		for _, call := range quoted.FindAllStringSubmatch(cells[1], -1) {
			found[call[1]] = most
		}
	}
	return func(c boundedCall) time.Duration {
		most, there := found[c.words]
		if !there {
			t.Errorf("docs/waiting.md has no row for %s", c.words)
		}
		if c.kind == pgxlock.KindAdvisory {
			return most[1]
		}
		return most[0]
	}
}

// publicCalls are the functions and methods that take a context, in the words of docs/waiting.md.
func publicCalls(t *testing.T) (words []string) {
	t.Helper()
	for dir, prefix := range map[string]string{"../..": "", "../../once": "once.", "../../ratelimit": "", "../../doctor": "doctor.", "../../migrations": "migrations."} {
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		declared := regexp.MustCompile(`(?m)^func (?:\(\w+ \*?([A-Z]\w*)\) )?([A-Z]\w*)\(ctx context\.Context`)
		for _, file := range files {
			if !strings.HasSuffix(file.Name(), ".go") || strings.HasSuffix(file.Name(), "_test.go") {
				continue
			}
			text, err := os.ReadFile(dir + "/" + file.Name())
			if err != nil {
				t.Fatal(err)
			}
			for _, call := range declared.FindAllStringSubmatch(string(text), -1) {
				switch call[1] {
				case "", "Locker", "Lock", "Locks":
					words = append(words, prefix+call[2])
				default:
					words = append(words, call[1]+"."+call[2])
				}
			}
		}
	}
	return words
}

func TestEachPublicCallHasABound(t *testing.T) {
	t.Parallel()
	bound, calls := bounds(t), publicCalls(t)
	if len(calls) < 40 {
		t.Errorf("found %d calls: %v", len(calls), calls)
	}
	for _, words := range calls {
		bound(boundedCall{words: words})
	}
}

// maxWait is long enough for a server that answers.
const maxWait = pgxlock.MaxWait(2 * time.Second)

// boundedCalls returns calls that are ready to be made over db.
func boundedCalls(t *testing.T, db *pgtest.DB) (all []boundedCall) {
	t.Helper()
	add := func(words string, kind pgxlock.Kind, call func(context.Context) error) {
		all = append(all, boundedCall{words, kind, call})
	}
	work := func(context.Context, *pgxlock.Lock) error { return nil }
	workTx := func(context.Context, pgx.Tx, *pgxlock.Lock) error { return nil }
	for kind, newLocker := range map[pgxlock.Kind]func(db *pgtest.DB) *pgxlock.Locker{
		pgxlock.KindLease: func(db *pgtest.DB) *pgxlock.Locker {
			return testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour})
		},
		pgxlock.KindAdvisory: func(db *pgtest.DB) *pgxlock.Locker { return testkit.NewAdvisory(t, db, nil) },
	} {
		locker := func() *pgxlock.Locker { // each call on one of its own, which is connected
			locks := newLocker(db)
			testkit.Release(t, testkit.Acquire(t, locks, "first"))
			return locks
		}
		on := func(words string, call func(ctx context.Context, l *pgxlock.Locker, key string) error) {
			locks, key := locker(), fmt.Sprint(kind, len(all))
			add(words, kind, func(ctx context.Context) error { return call(ctx, locks, key) })
		}
		on("TryAcquire", func(ctx context.Context, l *pgxlock.Locker, key string) error { return errorOf(l.TryAcquire(ctx, key)) })
		on("TryAcquire Shared", func(ctx context.Context, l *pgxlock.Locker, key string) error {
			return errorOf(l.TryAcquire(ctx, key, pgxlock.Shared))
		})
		on("TryDo", func(ctx context.Context, l *pgxlock.Locker, key string) error {
			return errorOf(l.TryDo(ctx, key, work))
		})
		on("NoWait", func(ctx context.Context, l *pgxlock.Locker, key string) error {
			return errorOf(l.Acquire(ctx, key, pgxlock.NoWait))
		})
		on("NoWait", func(ctx context.Context, l *pgxlock.Locker, key string) error {
			return errorOf(l.AcquireAll(ctx, []string{key, key + "b"}, pgxlock.NoWait))
		})
		on("Acquire MaxWait", func(ctx context.Context, l *pgxlock.Locker, key string) error {
			return errorOf(l.Acquire(ctx, key, maxWait))
		})
		on("AcquireAll MaxWait", func(ctx context.Context, l *pgxlock.Locker, key string) error {
			return errorOf(l.AcquireAll(ctx, []string{key, key + "b"}, maxWait))
		})
		on("Do MaxWait", func(ctx context.Context, l *pgxlock.Locker, key string) error { return l.Do(ctx, key, work, maxWait) })
		on("Acquire", func(ctx context.Context, l *pgxlock.Locker, key string) error { return errorOf(l.Acquire(ctx, key)) })
		on("AcquireAll", func(ctx context.Context, l *pgxlock.Locker, key string) error {
			return errorOf(l.AcquireAll(ctx, []string{key, key + "b"}))
		})
		on("Do", func(ctx context.Context, l *pgxlock.Locker, key string) error { return l.Do(ctx, key, work) })
		on("DoTx", func(ctx context.Context, l *pgxlock.Locker, key string) error {
			return l.DoTx(ctx, db.Pool, key, workTx)
		})
		on("Lead", func(ctx context.Context, l *pgxlock.Locker, key string) error {
			return l.Lead(ctx, key, func(context.Context, *pgxlock.Lock) error { return errors.New("one term") })
		})
		on("Holders", func(ctx context.Context, l *pgxlock.Locker, key string) error { return errorOf(l.Holders(ctx, key)) })
		on("Watch", func(ctx context.Context, l *pgxlock.Locker, key string) error { return firstOf(l.Watch(ctx, key)) })
		on("AskToStepDown", func(ctx context.Context, l *pgxlock.Locker, key string) error { return l.AskToStepDown(ctx, key) })
		lock := testkit.Acquire(t, locker(), "release")
		add("Release", kind, lock.Release)
		lock = testkit.Acquire(t, locker(), "renew")
		add("Renew", kind, lock.Renew)
		locks := locker()
		many, err := locks.AcquireAll(t.Context(), []string{"many", "more"})
		if err != nil {
			t.Fatal(err)
		}
		add("Release", kind, many.Release)
		locks = locker()
		testkit.Acquire(t, locks, "close")
		add("Close", kind, locks.Close)
		locks, begun, end, done := locker(), make(chan struct{}), make(chan struct{}), make(chan error, 1)
		go func() {
			done <- locks.Do(context.WithoutCancel(t.Context()), "do", func(context.Context, *pgxlock.Lock) error {
				close(begun)
				<-end
				return nil
			})
		}()
		pgtest.Receive(t, "the lock of Do", begun)
		add("Release", kind, func(context.Context) error { close(end); return <-done })

		fencing := locker()
		fenced := testkit.Acquire(t, fencing, "fence")
		tx, sqlTx := openTx(t, db), openSQLTx(t, db)
		add("Fence", kind, func(ctx context.Context) error { return fenced.Fence(ctx, tx) })
		add("FenceSQL", kind, func(ctx context.Context) error { return fenced.FenceSQL(ctx, sqlTx) })
	}

	const leases = pgxlock.KindLease
	semaphore := func() *pgxlock.Semaphore {
		s, err := testkit.NewLocker(t, db, nil).Semaphore(2)
		if err != nil {
			t.Fatal(err)
		}
		testkit.Release(t, <-testkit.WaitsForPermit(t, s, "first"))
		return s
	}
	permits := func(words string, call func(ctx context.Context, s *pgxlock.Semaphore, key string) error) {
		s, key := semaphore(), fmt.Sprint("permit ", len(all))
		add("Semaphore."+words, leases, func(ctx context.Context) error { return call(ctx, s, key) })
	}
	permits("TryAcquire", func(ctx context.Context, s *pgxlock.Semaphore, key string) error {
		return errorOf(s.TryAcquire(ctx, key))
	})
	permits("TryDo", func(ctx context.Context, s *pgxlock.Semaphore, key string) error {
		return errorOf(s.TryDo(ctx, key, work))
	})
	permits("Acquire MaxWait", func(ctx context.Context, s *pgxlock.Semaphore, key string) error {
		return errorOf(s.Acquire(ctx, key, maxWait))
	})
	permits("Do MaxWait", func(ctx context.Context, s *pgxlock.Semaphore, key string) error {
		return s.Do(ctx, key, work, maxWait)
	})
	permits("Acquire", func(ctx context.Context, s *pgxlock.Semaphore, key string) error { return errorOf(s.Acquire(ctx, key)) })
	permits("Do", func(ctx context.Context, s *pgxlock.Semaphore, key string) error { return s.Do(ctx, key, work) })
	permits("Holders", func(ctx context.Context, s *pgxlock.Semaphore, key string) error { return errorOf(s.Holders(ctx, key)) })

	limited := func(words string, call func(context.Context, *ratelimit.Limiter, *ratelimit.Reservation) error) {
		limiter, err := ratelimit.New(db.Pool, 1, 2, nil)
		if err != nil {
			t.Fatal(err)
		}
		reservation, err := limiter.Reserve(t.Context(), "first")
		if err != nil {
			t.Fatal(err)
		}
		add(words, leases, func(ctx context.Context) error { return call(ctx, limiter, reservation) })
	}
	limited("Limiter.Allow", func(ctx context.Context, l *ratelimit.Limiter, _ *ratelimit.Reservation) error {
		return errorOf(l.Allow(ctx, "k"))
	})
	limited("Limiter.Wait MaxWait", func(ctx context.Context, l *ratelimit.Limiter, _ *ratelimit.Reservation) error {
		return l.Wait(ctx, "k", maxWait)
	})
	limited("Limiter.Reserve MaxWait", func(ctx context.Context, l *ratelimit.Limiter, _ *ratelimit.Reservation) error {
		return errorOf(l.Reserve(ctx, "k", maxWait))
	})
	limited("Limiter.Wait", func(ctx context.Context, l *ratelimit.Limiter, _ *ratelimit.Reservation) error {
		return l.Wait(ctx, "k")
	})
	limited("Limiter.Reserve", func(ctx context.Context, l *ratelimit.Limiter, _ *ratelimit.Reservation) error {
		return errorOf(l.Reserve(ctx, "k"))
	})
	limited("Limiter.Close", func(ctx context.Context, l *ratelimit.Limiter, _ *ratelimit.Reservation) error { return l.Close(ctx) })
	limited("Reservation.Cancel", func(ctx context.Context, _ *ratelimit.Limiter, r *ratelimit.Reservation) error { return r.Cancel(ctx) })

	ran := func(words string, retry bool, call func(context.Context, *once.Runner) error) {
		runner, err := once.New(db.Pool, time.Hour, &once.Config{Retry: retry})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := runner.Do(t.Context(), fmt.Sprint("first ", words, retry), func(context.Context, once.Run) error { return nil }); err != nil {
			t.Fatal(err)
		}
		add(words, leases, func(ctx context.Context) error { return call(ctx, runner) })
	}
	for _, retry := range []bool{false, true} {
		ran("Runner.Do", retry, func(ctx context.Context, r *once.Runner) error {
			return errorOf(r.Do(ctx, fmt.Sprint("k", retry), func(context.Context, once.Run) error { return nil }))
		})
	}
	ran("Runner.Close", true, func(ctx context.Context, r *once.Runner) error { return r.Close(ctx) })

	inTx := func(words string, call func(context.Context, pgx.Tx) error) {
		tx := openTx(t, db)
		add(words, leases, func(ctx context.Context) error { return call(ctx, tx) })
	}
	inTx("LockTx", func(ctx context.Context, tx pgx.Tx) error { return pgxlock.LockTx(ctx, tx, "tx") })
	inTx("LockAllTx", func(ctx context.Context, tx pgx.Tx) error { return pgxlock.LockAllTx(ctx, tx, []string{"a", "b"}) })
	inTx("ClaimTx", func(ctx context.Context, tx pgx.Tx) error { return errorOf(pgxlock.ClaimTx(ctx, tx, "tx")) })
	inSQLTx := func(words string, call func(context.Context, *sql.Tx) error) {
		tx := openSQLTx(t, db)
		add(words, leases, func(ctx context.Context) error { return call(ctx, tx) })
	}
	inSQLTx("LockSQLTx", func(ctx context.Context, tx *sql.Tx) error { return pgxlock.LockSQLTx(ctx, tx, "sql") })
	inSQLTx("ClaimSQLTx", func(ctx context.Context, tx *sql.Tx) error { return errorOf(pgxlock.ClaimSQLTx(ctx, tx, "sql")) })

	mon, err := monitor.New(db.Pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	add("Monitor.Holders", leases, func(ctx context.Context) error { return errorOf(mon.Holders(ctx, monitor.Filter{})) })
	add("Monitor.Waiters", leases, func(ctx context.Context) error { return errorOf(mon.Waiters(ctx, monitor.Filter{})) })
	add("Monitor.Snapshot", leases, func(ctx context.Context) error { return errorOf(mon.Snapshot(ctx)) })
	add("Monitor.Watch", leases, func(ctx context.Context) error { return firstOf(mon.Watch(ctx, time.Second)) })
	add("Monitor.Reap", leases, func(ctx context.Context) error { return errorOf(mon.Reap(ctx, time.Hour)) })
	add("PurgeClaims", leases, func(ctx context.Context) error { return errorOf(pgxlock.PurgeClaims(ctx, db.Pool, time.Hour)) })
	add("once.List", leases, func(ctx context.Context) error { return errorOf(once.List(ctx, db.Pool, nil)) })
	add("doctor.Check", leases, func(ctx context.Context) error { return errorOf(doctor.Check(ctx, db.Pool, nil)) })
	add("migrations.Up", leases, func(ctx context.Context) error { return migrations.Up(ctx, db.Pool, nil) })
	return all
}

func openTx(t *testing.T, db *pgtest.DB) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func openSQLTx(t *testing.T, db *pgtest.DB) *sql.Tx {
	t.Helper()
	handle := stdlib.OpenDBFromPool(db.Pool)
	tx, err := handle.BeginTx(context.WithoutCancel(t.Context()), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = tx.Rollback()
		_ = handle.Close()
	})
	return tx
}

// errorOf and firstOf leave the error of an answer that nobody looks at.
func errorOf[A any](_ A, err error) error { return err }

func firstOf[A any](all iter.Seq2[A, error]) error {
	for _, err := range all {
		return err
	}
	return nil
}

// Each call returns in time, whatever becomes of the server. A machine that is busy itself may take longer;
// a call that has lost its bound takes longer than that.
func TestCallsReturnInTimeWhateverBecomesOfTheServer(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	wide := func(c *pgxpool.Config) { c.MaxConns = 100 }
	for name, through := range map[string]func(t *testing.T, server *pgserver.Server, direct *pgtest.DB) (db *pgtest.DB, breakIt, mend func()){
		"dead network": func(t *testing.T, _ *pgserver.Server, direct *pgtest.DB) (db *pgtest.DB, breakIt, mend func()) {
			proxy, db := testkit.Proxied(t, direct, wide)
			return db, proxy.BlackHole, func() {
				proxy.Heal()
				proxy.Reset()
			}
		},
		"server refuses": func(t *testing.T, _ *pgserver.Server, direct *pgtest.DB) (db *pgtest.DB, breakIt, mend func()) {
			proxy, db := testkit.Proxied(t, direct, wide)
			return db, func() {
				proxy.Refuse()
				proxy.Reset()
			}, proxy.Heal
		},
		"frozen server": func(t *testing.T, server *pgserver.Server, direct *pgtest.DB) (db *pgtest.DB, breakIt, mend func()) {
			db = &pgtest.DB{Pool: direct.NewPool(t, wide), URL: direct.URL, Name: direct.Name}
			return db, func() {
				if err := server.Freeze(); err != nil {
					t.Fatal(err)
				}
			}, func() { _ = server.Thaw() }
		},
		"full pool": func(t *testing.T, _ *pgserver.Server, direct *pgtest.DB) (db *pgtest.DB, breakIt, mend func()) {
			const most = 20
			db = &pgtest.DB{Pool: direct.NewPool(t, func(c *pgxpool.Config) { c.MaxConns = most }), URL: direct.URL, Name: direct.Name}
			return db, func() {
				for db.Pool.Stat().AcquiredConns() < most {
					conn, err := db.Pool.Acquire(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(conn.Release)
				}
			}, func() {}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bound := bounds(t)
			server, direct := privateServer(t, map[string]string{"max_connections": "400"})
			db, breakIt, mend := through(t, server, direct)
			calls := boundedCalls(t, db)
			defer mend()
			breakIt()
			var made sync.WaitGroup
			for _, c := range calls {
				most, limit := bound(c), 10*time.Minute
				if most == 0 { // as MaxWait, or its context
					most = time.Duration(maxWait)
					if !strings.HasSuffix(c.words, " MaxWait") {
						limit = most
					}
				}
				made.Go(func() {
					ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit)
					defer cancel()
					began := time.Now()
					err := c.call(ctx)
					took := time.Since(began)
					t.Logf("%-28s %-8v %6.2f s of %s: %.120v", c.words, c.kind, took.Seconds(), most, err)
					if took > most*3/2+5*time.Second {
						t.Errorf("%s %s took %s where %s are promised: %v", c.kind, c.words, took, most, err)
					}
				})
			}
			made.Wait()
		})
	}
}
