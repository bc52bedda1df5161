package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// The locks of a session are lost together with it, whatever ends it: their holder
// is told, and anybody can have them (I2).

// kill kills the backend of that owner, as an operator or a lack of memory might.
func kill(t *testing.T, db *pgtest.DB, owner string) {
	t.Helper()
	for _, pid := range testkit.Backends(t, db, owner) {
		backend, err := os.FindProcess(int(pid))
		if err == nil {
			err = backend.Kill()
		}
		if err != nil && !errors.Is(err, os.ErrProcessDone) { // the server ends all when one was killed
			t.Fatal(err)
		}
	}
}

func TestEveryEndOfTheSessionLosesAllAdvisoryLocks(t *testing.T) {
	t.Parallel()
	type stage struct {
		server *pgserver.Server
		proxy  *testkit.Proxy
		direct *pgtest.DB // does not go through the proxy
	}
	type row struct {
		end   func(t *testing.T, s stage)
		state []string // what the server has said, one of them; none: nothing; "": or nothing
	}
	try := func(t *testing.T, server *pgserver.Server, direct *pgtest.DB, rows map[string]row) {
		for name, test := range rows {
			t.Run(name, func(t *testing.T) {
				p, through := testkit.Proxied(t, direct)
				locks := testkit.NewAdvisory(t, through, &pgxlock.AdvisoryConfig{Owner: "loser"})
				loseAll(t, locks, direct, test.state, func() { test.end(t, stage{server, p, direct}) })
			})
		}
	}
	try(t, nil, pgtest.New(t), map[string]row{
		"terminated":       {func(t *testing.T, s stage) { testkit.Terminate(t, s.direct, "loser") }, []string{"57P01"}},
		"connection cut":   {func(_ *testing.T, s stage) { s.proxy.Cut() }, nil},
		"connection reset": {func(_ *testing.T, s stage) { s.proxy.Reset() }, nil},
	})
	if testing.Short() {
		return
	}
	server, direct := privateServer(t, nil)
	try(t, server, direct, map[string]row{
		"fast stop": {func(t *testing.T, s stage) {
			if err := s.server.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
		}, []string{"57P01"}},
		"immediate stop": {func(t *testing.T, s stage) {
			if err := errors.Join(s.server.Crash(), s.server.Restart(t.Context())); err != nil {
				t.Fatal(err)
			}
		}, []string{"57P01", "57P02", ""}}, // which it has no time for at times
		"killed": {func(t *testing.T, s stage) { kill(t, s.direct, "loser") }, nil},
		"another backend was killed": {func(t *testing.T, s stage) {
			victim := s.direct.Connect(t)
			if _, err := victim.Exec(t.Context(), "set application_name = 'pgxlock victim'"); err != nil {
				t.Fatal(err)
			}
			kill(t, s.direct, "victim")
		}, []string{"57P02", ""}},
	})
}

// loseAll holds locks in every way, ends their session, and looks at what follows.
func loseAll(t *testing.T, locks *pgxlock.Locker, after *pgtest.DB, states []string, end func()) {
	t.Helper()
	held := testkit.AcquireMany(t, locks, 50)
	all, err := locks.AcquireAll(t.Context(), []string{"a", "b", "c"})
	if err != nil {
		t.Fatal(err)
	}
	held = append(held, all...)
	held = append(held, testkit.Acquire(t, locks, "shared", pgxlock.Shared), testkit.Acquire(t, locks, "shared", pgxlock.Shared), testkit.Acquire(t, locks, pgxlock.RawKey2(4, 2)))
	given := testkit.Acquire(t, locks, "given back before")
	if err := given.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	work, cancel := held[0].Context(t.Context())
	defer cancel()
	child, cancelChild := context.WithTimeout(work, time.Hour)
	defer cancelChild()
	together, cancelTogether := all.Context(t.Context())
	defer cancelTogether()
	inside, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- locks.Do(t.Context(), "do", func(ctx context.Context, _ *pgxlock.Lock) error {
			close(inside)
			<-ctx.Done()
			return context.Cause(ctx)
		})
	}()
	<-inside

	noticed := make(chan time.Duration, 1)
	began := time.Now()
	go func() {
		<-held[0].Lost()
		noticed <- time.Since(began)
	}()
	end()
	for _, lock := range held {
		wantLost(t, lock)
	}
	t.Logf("Lost %s after the end was begun", <-noticed)
	for what, err := range map[string]error{
		"a context": context.Cause(work), "a child of it": context.Cause(child), "that of many locks": context.Cause(together), "Do": <-done,
	} {
		if !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("%s: %v, want ErrLost", what, err)
		}
	}
	if err := errors.Join(work.Err(), child.Err(), together.Err()); err == nil {
		t.Error("contexts go on")
	}
	if !errors.Is(given.Err(), pgxlock.ErrReleased) || given.Release(t.Context()) != nil {
		t.Errorf("what was given back before: %v, %v", given.Err(), given.Release(t.Context()))
	}
	said := ""
	if pgErr, ok := errors.AsType[*pgconn.PgError](held[0].Err()); ok {
		said = pgErr.Code
	}
	if len(states) == 0 && said != "" || len(states) > 0 && !slices.Contains(states, said) {
		t.Errorf("%v has SQLSTATE %q, want one of %q", held[0].Err(), said, states)
	}

	after.Pool.Reset() // its connections have ended as well

	// Others get them, and who has lost them finds them busy like everybody else.
	others := testkit.NewAdvisory(t, after, nil)
	var next *pgxlock.Lock
	pgtest.Until(t, "somebody else has a lost key", func() bool {
		next, err = others.Acquire(t.Context(), "a", pgxlock.MaxWait(10*time.Second))
		return err == nil
	})
	pgtest.Until(t, "the Locker has a new session", func() bool {
		_, err := locks.TryAcquire(t.Context(), "a")
		if err == nil {
			t.Fatal("two have the key")
		}
		return errors.Is(err, pgxlock.ErrNotAcquired)
	})
	again, err := locks.AcquireAll(t.Context(), []string{"b", "c", "shared", pgxlock.RawKey2(4, 2)}, testkit.LongWait)
	if err != nil {
		t.Fatal(err)
	}
	pgtest.Until(t, "the server has what is live, and nothing else", func() bool { // its end frees one after the other
		return testkit.HeldBy(t, after, "loser") == len(again)
	})
	for _, lock := range held {
		if !errors.Is(lock.Err(), pgxlock.ErrLost) {
			t.Errorf("%s: %v: a new session has revived it", lock.Key(), lock.Err())
		}
	}
	wantLost(t, held[len(held)-1])
	for _, lock := range append(again, next) {
		if err := errors.Join(lock.Err(), lock.Renew(t.Context()), lock.Release(t.Context())); err != nil {
			t.Errorf("%s: %v", lock.Key(), err)
		}
	}
	if n := testkit.HeldBy(t, after, "loser"); n != 0 {
		t.Errorf("%d locks are left in the server", n)
	}
}

func TestFailoverLosesAllAdvisoryLocks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, end := range map[string]func(*pgserver.Server) error{"crash": (*pgserver.Server).Crash, "kill": (*pgserver.Server).Kill} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			primary, _ := privateServer(t, nil)
			standby := pgtest.Standby(t, primary, pgserver.Config{})
			locks := testkit.NewAdvisory(t, testkit.On(t, "", primary, standby), &pgxlock.AdvisoryConfig{Owner: "loser"})
			// Some are killed at once; others have time to say that the postmaster is gone.
			loseAll(t, locks, testkit.On(t, "", standby), []string{"57P01", "57P02", ""}, func() {
				if err := end(primary); err != nil {
					t.Fatal(err)
				}
				promote(t, standby)
			})
		})
	}
}

// Where the network swallows everything, the holder knows before the server frees
// the locks, and so before anybody else has them.
func TestBlackHoleIsReportedBeforeAnybodyElseIsGrantedTheAdvisoryLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, what := range map[string]testkit.FaultKind{"between messages": -1, "half a message": testkit.HalfRequest, "all but the last byte": testkit.AlmostRequest} {
		for _, many := range []bool{false, true}[:min(int(what)+2, 2)] { // there is one way to send nothing
			t.Run(fmt.Sprintf("%s, many: %t", name, many), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				p, through := testkit.Proxied(t, db)
				locks, others := testkit.NewAdvisory(t, through, &pgxlock.AdvisoryConfig{TTL: 3 * time.Second, Owner: "swallowed"}), testkit.NewAdvisory(t, db, nil)
				t.Cleanup(func() { p.Heal(); p.Cut() }) // the Locker can say goodbye in the end
				lock := grantedInTime(t, locks, "k")

				p.Refuse() // so that it is the server who ends the session
				lastHeld := watch(lock)
				asked := make(chan error, 1)
				if what < 0 {
					p.BlackHole()
				} else {
					asks := fmt.Sprintf("call of function %d", lockFunctions[0])
					if many {
						asks = "EXECUTE \"pgxlock_batch"
					}
					stalled := p.Arm(t, what, asks)
					go func() {
						var err error
						if many {
							_, err = locks.AcquireAll(t.Context(), keysByNumber(200))
						} else {
							_, err = locks.Acquire(t.Context(), "another")
						}
						asked <- err
					}()
					stalled.Happened(t)
				}
				next := testkit.Acquire(t, others, "k", pgxlock.MaxWait(pgtest.Patience))
				granted := time.Now()
				if last := <-lastHeld; !last.Before(granted) {
					t.Errorf("held %s after somebody else was granted the lock", last.Sub(granted))
				}
				wantLost(t, lock)
				if what >= 0 {
					if err := <-asked; err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
						t.Errorf("a call whose message was cut short: %v", err)
					}
				}
				pgtest.Until(t, "the server has ended the session", func() bool { return len(testkit.Backends(t, db, "swallowed")) == 0 })
				if n := testkit.AdvisoryCount(t, db); n != 2 { // the next holder's, and its own
					t.Errorf("%d advisory locks, want 2", n)
				}
				p.Heal()
				testkit.UntilConnected(t, locks)
				wantLost(t, lock)
				if err := errors.Join(next.Err(), next.Release(t.Context())); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestCloseTellsAWorkThatItDoesNotWaitFor(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, err := pgxlock.NewAdvisoryLocker(db.Pool, &pgxlock.AdvisoryConfig{TTL: -1})
	if err != nil {
		t.Fatal(err)
	}
	err = locks.Do(t.Context(), "k", func(_ context.Context, lock *pgxlock.Lock) error {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		if err := locks.Close(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("Close: %v", err)
		}
		pgtest.Receive(t, "the session has ended", lock.Lost())
		if err := lock.Err(); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("the session has ended, and of the lock it says %v", err)
		}
		return nil
	})
	if !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("Do: %v", err)
	}
}
