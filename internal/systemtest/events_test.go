package systemtest_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// A recorder keeps the events of calls that are not those of a Locker.
type recorder struct {
	mu     sync.Mutex
	events []pgxlock.Event
}

func (r *recorder) observe(_ context.Context, e pgxlock.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

// take returns the events since the last call, and checks what all of them have.
func (r *recorder) take(t *testing.T, ops ...pgxlock.EventOp) []pgxlock.Event {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	var got []pgxlock.EventOp
	for _, e := range r.events {
		got = append(got, e.Op)
		if e.Call == 0 || e.Time.IsZero() || e.Wait < 0 || e.Held < 0 {
			t.Errorf("%+v has no number or no time, or a negative duration", e)
		}
	}
	if !slices.Equal(got, ops) {
		t.Fatalf("events %v, want %v", got, ops)
	}
	events := r.events
	r.events = nil
	return events
}

func TestLockTxEmitsOneEventWithItsWaitAndItsError(t *testing.T) {
	t.Parallel()
	db, ctx := testkit.Migrated(t), t.Context()
	var r recorder
	holder, other := begin(t, db), begin(t, db)
	if err := pgxlock.LockTx(ctx, holder, "k", pgxlock.Observe(r.observe)); err != nil {
		t.Fatal(err)
	}
	if e := r.take(t, pgxlock.EventTxLock)[0]; e.Key != "k" || e.Kind != pgxlock.KindAdvisory || e.N != 1 || e.Err != nil || e.Wait <= 0 {
		t.Errorf("%+v", e)
	}
	err := pgxlock.LockTx(ctx, other, "k", pgxlock.MaxWait(50*time.Millisecond), pgxlock.Observe(r.observe))
	if !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Fatal(err)
	}
	e := r.take(t, pgxlock.EventTxLock)[0]
	if !errors.Is(e.Err, pgxlock.ErrNotAcquired) || e.Err.Error() != err.Error() || e.Wait < 50*time.Millisecond {
		t.Errorf("told %+v, want %v", e, err)
	}
	if err := pgxlock.LockAllTx(ctx, other, []string{"a", "b", "a"}, pgxlock.Shared, pgxlock.Observe(r.observe)); err != nil {
		t.Fatal(err)
	}
	if e := r.take(t, pgxlock.EventTxLock)[0]; e.Key != "" || e.N != 2 || e.Mode != pgxlock.Shared {
		t.Errorf("of two keys: %+v", e)
	}
	if err := pgxlock.LockTx(ctx, other, "", pgxlock.Observe(r.observe)); err == nil {
		t.Error("an empty key is locked")
	}
	r.take(t) // refused for its arguments
}

func TestClaimEmitsWhetherItWasFirst(t *testing.T) {
	t.Parallel()
	db, ctx := testkit.Migrated(t), t.Context()
	var r recorder
	first, second := begin(t, db), begin(t, db)
	if _, err := pgxlock.ClaimTx(ctx, first, "order:1", pgxlock.Observe(r.observe)); err != nil {
		t.Fatal(err)
	}
	if e := r.take(t, pgxlock.EventClaim)[0]; e.Key != "order:1" || !e.Granted || e.Err != nil || e.Kind != 0 {
		t.Errorf("the first one: %+v", e)
	}
	if _, err := pgxlock.ClaimTx(ctx, second, "order:1", pgxlock.NoWait, pgxlock.Observe(r.observe)); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Fatal(err)
	}
	if e := r.take(t, pgxlock.EventClaim)[0]; e.Granted || !errors.Is(e.Err, pgxlock.ErrNotAcquired) {
		t.Errorf("while it is open: %+v", e)
	}
	if err := first.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := pgxlock.ClaimTx(ctx, second, "order:1", pgxlock.Observe(r.observe)); err != nil {
		t.Fatal(err)
	}
	if e := r.take(t, pgxlock.EventClaim)[0]; e.Granted || e.Err != nil {
		t.Errorf("once it is done: %+v", e)
	}
}

func TestLimiterEmitsOneEventPerCall(t *testing.T) {
	t.Parallel()
	db, ctx := testkit.Migrated(t), t.Context()
	var r recorder
	limiter, err := ratelimit.New(db.Pool, ratelimit.Every(time.Hour), 2, &ratelimit.Config{Observe: r.observe})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.AllowN(ctx, "k", 2); err != nil {
		t.Fatal(err)
	}
	if e := r.take(t, pgxlock.EventLimit)[0]; e.Key != "k" || e.N != 2 || !e.Granted || e.Err != nil || e.Wait <= 0 {
		t.Errorf("allowed: %+v", e)
	}
	if ok, err := limiter.Allow(ctx, "k"); ok || err != nil {
		t.Fatal(ok, err)
	}
	if e := r.take(t, pgxlock.EventLimit)[0]; e.N != 1 || e.Granted || !errors.Is(e.Err, ratelimit.ErrLimited) {
		t.Errorf("refused: %+v", e)
	}
	if err := limiter.Wait(ctx, "k", pgxlock.MaxWait(time.Second)); !errors.Is(err, ratelimit.ErrLimited) {
		t.Fatal(err)
	}
	if e := r.take(t, pgxlock.EventLimit)[0]; e.Granted || !errors.Is(e.Err, ratelimit.ErrLimited) {
		t.Errorf("a wait that is too long: %+v", e)
	}
	if _, err := limiter.Reserve(ctx, "k"); err != nil {
		t.Fatal(err)
	}
	if e := r.take(t, pgxlock.EventLimit)[0]; !e.Granted || e.Err != nil {
		t.Errorf("reserved: %+v", e)
	}
	waiting, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- limiter.Wait(waiting, "k") }()
	pgtest.Until(t, "the wait is counted", func() bool {
		_, err := limiter.Reserve(ctx, "k", pgxlock.MaxWait(150*time.Minute))
		return errors.Is(err, ratelimit.ErrLimited)
	})
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	r.mu.Lock()
	last := r.events[len(r.events)-1]
	r.events = nil
	r.mu.Unlock()
	if last.Granted || !errors.Is(last.Err, context.Canceled) {
		t.Errorf("a wait that was left: %+v", last)
	}
	if _, err := limiter.AllowN(ctx, "k", 3); err == nil {
		t.Error("more than the burst is allowed")
	}
	if err := limiter.Close(ctx); err != nil {
		t.Error(err)
	}
	if _, err := limiter.Allow(ctx, "k"); !errors.Is(err, pgxlock.ErrClosed) {
		t.Error(err)
	}
	r.take(t) // refused for their arguments, and closed
}

func TestRunEmitsItsStartBeforeTheWorkAndItsEndAfterTheRecord(t *testing.T) {
	t.Parallel()
	for _, retry := range []bool{false, true} {
		if retry && testing.Short() {
			continue
		}
		t.Run(map[bool]string{false: "once", true: "with Retry"}[retry], func(t *testing.T) {
			t.Parallel()
			db, ctx := testkit.Migrated(t), t.Context()
			var r recorder
			states := make(map[pgxlock.EventOp]string) // of the row, when the event comes
			runner, err := once.New(db.Pool, 3000*time.Hour, &once.Config{Retry: retry, Observe: func(ctx context.Context, e pgxlock.Event) {
				var state string
				if err := db.Pool.QueryRow(ctx, "select state from pgxlock_runs where run_key = $1", e.Key).Scan(&state); err != nil {
					t.Error(err)
				}
				states[e.Op] = state
				r.observe(ctx, e)
			}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = runner.Close(context.Background()) })
			failure := errors.New("of the work")
			_, err = runner.Do(ctx, "job", func(_ context.Context, run once.Run) error {
				e := r.take(t, pgxlock.EventRun)[0]
				if e.Key != "job" || !e.Granted || e.Attempt != 1 || !e.Slot.Equal(run.Slot) || e.Token != run.Lock.Token() || e.Holder == "" || e.Wait <= 0 {
					t.Errorf("its start: %+v of %+v", e, run)
				}
				return failure
			})
			if !errors.Is(err, failure) {
				t.Fatal(err)
			}
			if e := r.take(t, pgxlock.EventRunEnded)[0]; !errors.Is(e.Err, failure) || e.Held <= 0 || e.Attempt != 1 || e.Slot.IsZero() {
				t.Errorf("its end: %+v", e)
			}
			if states[pgxlock.EventRun] != "running" || states[pgxlock.EventRunEnded] != "failed" {
				t.Errorf("the row when the events came: %v", states)
			}

			ran, err := runner.Do(ctx, "job", func(context.Context, once.Run) error { return nil })
			if ran != retry || err != nil {
				t.Fatal(ran, err)
			}
			if retry {
				events := r.take(t, pgxlock.EventRun, pgxlock.EventRunEnded)
				if events[0].Attempt != 2 || events[0].Call != events[1].Call || events[1].Err != nil {
					t.Errorf("the second attempt: %+v", events)
				}
			} else if e := r.take(t, pgxlock.EventRun)[0]; e.Granted || e.Err != nil {
				t.Errorf("a run that had been: %+v", e)
			}

			func() {
				defer func() { _ = recover() }()
				_, _ = runner.Do(ctx, "panics", func(context.Context, once.Run) error { panic("of the work") })
			}()
			if e := r.take(t, pgxlock.EventRun, pgxlock.EventRunEnded)[1]; e.Err == nil || !strings.Contains(e.Err.Error(), "of the work") {
				t.Errorf("the end of a run that panicked: %+v", e)
			}
		})
	}
}

func TestTermIsEmittedBetweenItsLockAndTheRelease(t *testing.T) {
	onEachKind(t, func(t *testing.T, o *observedLocker, db *pgtest.DB, _ *testkit.Proxy) {
		ctx := t.Context()
		stop := errors.New("resigned")
		terms := 0
		err := o.Lead(ctx, "k", func(work context.Context, lock *pgxlock.Lock) error {
			if terms++; terms == 1 {
				if err := o.AskToStepDown(ctx, "k"); err != nil {
					t.Error(err)
				}
				<-work.Done()
				return nil
			}
			return stop
		})
		if !errors.Is(err, stop) {
			t.Fatal(err)
		}
		closes(t, o)
		o.wants(t, 2, 0, 2)
		var got []pgxlock.EventOp
		for _, e := range o.events {
			if e.Op != pgxlock.EventRenewed && e.Op != pgxlock.EventBusy {
				got = append(got, e.Op)
			}
		}
		term := []pgxlock.EventOp{pgxlock.EventWait, pgxlock.EventAcquired, pgxlock.EventTerm, pgxlock.EventTermEnded, pgxlock.EventReleased}
		if want := slices.Concat(term, term); !slices.Equal(got, want) {
			t.Fatalf("events %v, want %v", got, want)
		}
		ends := o.of(pgxlock.EventTermEnded)
		if !errors.Is(ends[0].Err, pgxlock.ErrStepDown) || !errors.Is(ends[1].Err, stop) {
			t.Errorf("the terms ended with %v and %v", ends[0].Err, ends[1].Err)
		}
	})
}

func TestTermOfALostLockEndsWhenItsWorkReturns(t *testing.T) {
	pgtest.Long(t)
	onEachKind(t, func(t *testing.T, o *observedLocker, db *pgtest.DB, _ *testkit.Proxy) {
		ctx, cancel := context.WithCancel(t.Context())
		mon := testkit.NewMonitor(t, db, nil)
		err := o.Lead(ctx, "k", func(work context.Context, lock *pgxlock.Lock) error {
			evictOnly(t, mon, o.Kind())
			_ = lock.Renew(ctx) // a lease notices then
			<-work.Done()
			pgtest.Until(t, "the loss is told", func() bool { return o.Count(pgxlock.EventLost) == 1 })
			cancel()
			return nil
		}, testkit.LongWait)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Lead: %v", err)
		}
		closes(t, o)
		o.wants(t, 1, 1, 0)
		if e := o.of(pgxlock.EventTermEnded)[0]; !errors.Is(e.Err, pgxlock.ErrEvicted) {
			t.Errorf("the term ended with %v", e.Err)
		}
		if e := o.of(pgxlock.EventLost)[0]; !errors.Is(e.Err, pgxlock.ErrEvicted) {
			t.Errorf("it was lost by %v", e.Err)
		}
	})
}

// evictOnly takes the only lock of that kind away from its holder.
func evictOnly(t *testing.T, m *monitor.Monitor, kind pgxlock.Kind) {
	t.Helper()
	holders, err := m.Holders(t.Context(), monitor.Filter{Kind: kind})
	if err != nil || len(holders) != 1 {
		t.Fatalf("%v, %v", holders, err)
	}
	if evicted, err := m.Evict(t.Context(), holders[0], "for a test"); !evicted || err != nil {
		t.Fatal(evicted, err)
	}
}

func TestEvictionEmitsWhoseLockWasTakenAndWhy(t *testing.T) {
	t.Parallel()
	db, ctx := testkit.Migrated(t), t.Context()
	var r recorder
	mon := testkit.NewMonitor(t, db, &monitor.Config{Observe: r.observe})
	locks := testkit.NewLocker(t, db, nil)
	lock := testkit.Acquire(t, locks, "k")
	evictOnly(t, mon, pgxlock.KindLease)
	e := r.take(t, pgxlock.EventEvicted)[0]
	if e.Key != "k" || e.Kind != pgxlock.KindLease || e.Holder != lock.Holder() || e.Token != lock.Token() || !e.Granted || e.EvictionReason != "for a test" || e.Err != nil {
		t.Errorf("%+v", e)
	}
	if evicted, err := mon.Evict(ctx, pgxlock.Holder{Key: "k", Kind: pgxlock.KindLease, ID: lock.Holder(), Token: lock.Token()}, "again"); evicted || err != nil {
		t.Fatal(evicted, err)
	}
	if e := r.take(t, pgxlock.EventEvicted)[0]; e.Granted || e.EvictionReason != "again" {
		t.Errorf("of a lock that is gone: %+v", e)
	}
	_ = lock.Renew(ctx) // which notices it
	wantLost(t, lock)

	conn, err := pgx.ConnectConfig(ctx, db.Pool.Config().ConnConfig)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(ctx, "select pg_advisory_lock(1), pg_advisory_lock(2)"); err != nil {
		t.Fatal(err)
	}
	session, err := mon.Session(ctx, int32(conn.PgConn().PID()))
	if err != nil {
		t.Fatal(err)
	}
	if ended, err := mon.Terminate(ctx, session, "hangs"); !ended || err != nil {
		t.Fatal(ended, err)
	}
	events := r.take(t, pgxlock.EventEvicted, pgxlock.EventEvicted)
	if events[0].Key == events[1].Key || events[0].Call != events[1].Call || !events[1].Granted || events[1].Kind != pgxlock.KindAdvisory || events[1].EvictionReason != "hangs" {
		t.Errorf("of a session that was ended: %+v", events)
	}
}

// The same thing has the same name in records about events, holders and waiters.
func TestAttributesOfAnEventAreNamedAsThoseOfAHolder(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, nil))
	var r recorder
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "me", Observe: r.observe})
	lock := testkit.Acquire(t, locks, "k")
	holders, err := locks.Holders(t.Context(), "k")
	if err != nil || len(holders) != 1 {
		t.Fatal(holders, err)
	}
	acquired := r.take(t, pgxlock.EventWait, pgxlock.EventAcquired)[1]
	acquired.Err = lock.Release(t.Context())
	log.Info("event", "lock", acquired)
	log.Info("holder", "lock", holders[0])
	lines := strings.SplitN(text.String(), "\n", 2)
	for _, name := range []string{"lock.key=", "lock.kind=", "lock.holder=", "lock.token="} {
		var values []string
		for _, line := range lines {
			_, rest, _ := strings.Cut(line, name)
			value, _, _ := strings.Cut(rest, " ")
			values = append(values, strings.TrimSpace(value))
		}
		if values[0] == "" || values[0] != values[1] {
			t.Errorf("%s%q in\n%s", name, values, text.String())
		}
	}
	if !strings.Contains(lines[0], "lock.op=acquired") || !strings.Contains(lines[0], "lock.call=") {
		t.Errorf("no operation or number in %s", lines[0])
	}
}

// begin begins a transaction that ends with the test.
func begin(t *testing.T, db *pgtest.DB) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}
