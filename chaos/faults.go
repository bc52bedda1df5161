package main

import (
	"context"
	_ "embed"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/chaos/internal/history"
	"github.com/pgxlock/pgxlock/internal/cutnet"
	"github.com/pgxlock/pgxlock/monitor"
)

//go:embed sql/terminate.sql
var terminateSQL string

//go:embed sql/fill_lock_table.sql
var fillLockTableSQL string

// An injector injects the faults of a round.
type injector struct {
	*stage

	workers *workers
	history *history.Writer
	op      func() int64
}

// A fault is how often it comes in a round, how long it lasts, and what it does. do returns when its effect has ended.
type fault struct {
	name   history.Fault
	once   bool
	lasts  time.Duration // at most
	target bool          // it concerns one worker
	each   bool          // do writes its events, one after the other
	do     func(in *injector, ctx context.Context, lasts time.Duration, w *worker, rng *rand.Rand) error
}

var faults = map[string]fault{
	"kill":        {name: history.Kill, lasts: time.Second, target: true, do: (*injector).kill},
	"freeze":      {name: history.Freeze, lasts: time.Second, target: true, do: (*injector).freeze},
	"cut":         {name: history.Cut, lasts: 4 * time.Second, do: (*injector).cut},
	"swallow":     {name: history.Swallow, lasts: 4 * time.Second, do: (*injector).swallow},
	"delay":       {name: history.Delay, lasts: 3 * time.Second, do: (*injector).delay},
	"lost-commit": {name: history.LoseAnswer, lasts: 3 * time.Second, do: (*injector).loseAnswers},
	"terminate":   {name: history.Terminate, lasts: 2 * time.Second, do: (*injector).terminate},
	"crash":       {name: history.Crash, lasts: time.Second, do: (*injector).crash},
	"promote":     {name: history.Promote, lasts: time.Second, once: true, do: (*injector).promote},
	"pooler":      {name: history.Pause, lasts: 2 * time.Second, do: (*injector).pausePooler},
	"exhaust":     {name: history.Exhaust, lasts: 3 * time.Second, do: (*injector).exhaust},
	"locktable":   {name: history.LockTable, lasts: 3 * time.Second, do: (*injector).fillLockTable},
	"timeouts":    {name: history.Timeouts, once: true, do: func(*injector, context.Context, time.Duration, *worker, *rand.Rand) error { return nil }},
	"clock":       {name: history.ClockJump, lasts: 3 * time.Second, do: (*injector).jumpClock},
	"evict":       {name: history.Evict, lasts: 2 * time.Second, each: true, do: (*injector).evict},
}

// inject injects a fault again and again until ctx ends. rng alone says how often, how long and where.
func (in *injector) inject(ctx context.Context, named string, rng *rand.Rand) error {
	f, ok := faults[named]
	if !ok { // none
		return nil
	}
	if f.name == history.Promote && in.plan.Async {
		f.name = history.PromoteAsync
	}
	for {
		pause, lasts := time.Duration(rng.Int64N(int64(2*time.Second))), time.Duration(rng.Int64N(int64(f.lasts)+1))
		nth := rng.IntN(in.plan.Workers)
		if f.once { // not before there is something to lose
			pause += in.plan.Lasts / 4
		}
		if named == "timeouts" { // they were there before
			pause = 0
		}
		if !sleep(ctx, pause) {
			return nil
		}
		if f.each {
			if err := f.do(in, ctx, lasts, nil, rng); err != nil && ctx.Err() == nil {
				return err
			}
			continue
		}
		var w *worker
		e := history.Event{What: history.FaultBegun, Fault: f.name, Op: in.op()}
		if f.target {
			w = in.workers.at(nth)
			e.Target = w.name
		}
		in.history.Write(e)
		err := f.do(in, ctx, lasts, w, rng)
		if named == "timeouts" { // they last until the end
			return nil
		}
		e.What = history.FaultEnded
		in.history.Write(e)
		if err != nil && ctx.Err() == nil {
			return err
		}
		if f.once {
			return nil
		}
		if named == "kill" { // the fault is over with the process
			sleep(ctx, lasts)
			if err := in.workers.restart(w); err != nil {
				return err
			}
		}
	}
}

func (in *injector) kill(_ context.Context, _ time.Duration, w *worker, _ *rand.Rand) error {
	return w.kill()
}

// freeze stops a worker for longer than its locks last.
func (in *injector) freeze(ctx context.Context, lasts time.Duration, w *worker, _ *rand.Rand) error {
	if err := w.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	sleep(ctx, in.plan.TTL+lasts)
	return w.signal(syscall.SIGCONT)
}

// cut cuts the network; what it held back arrives late, or never.
func (in *injector) cut(ctx context.Context, lasts time.Duration, _ *worker, rng *rand.Rand) error {
	return in.breakNetwork(ctx, lasts, (*cutnet.Relay).Cut, rng.IntN(2) == 0)
}

// swallow is cut for one direction. Nothing that was held back arrives.
func (in *injector) swallow(ctx context.Context, lasts time.Duration, _ *worker, rng *rand.Rand) error {
	return in.breakNetwork(ctx, lasts, pick(rng, (*cutnet.Relay).CutRequests, (*cutnet.Relay).CutAnswers), true)
}

func (in *injector) breakNetwork(ctx context.Context, lasts time.Duration, cut func(*cutnet.Relay) error, lost bool) error {
	var errs []error
	for _, relay := range in.relays {
		errs = append(errs, cut(relay))
	}
	sleep(ctx, lasts)
	for _, relay := range in.relays {
		if lost {
			relay.Reset()
		}
		errs = append(errs, relay.Heal())
	}
	return errors.Join(errs...)
}

func (in *injector) delay(ctx context.Context, lasts time.Duration, _ *worker, rng *rand.Rand) error {
	in.late.Store(int64(pick(rng, time.Millisecond, 10*time.Millisecond, 100*time.Millisecond)))
	sleep(ctx, lasts)
	in.late.Store(0)
	return nil
}

func (in *injector) loseAnswers(ctx context.Context, lasts time.Duration, _ *worker, rng *rand.Rand) error {
	in.lose.Store(pick[uint32](rng, 5, 30, 150))
	sleep(ctx, lasts)
	in.lose.Store(0)
	return nil
}

func (in *injector) terminate(ctx context.Context, lasts time.Duration, _ *worker, rng *rand.Rand) error {
	many := pick(rng, 1, 1, 3, 100)
	for until := time.Now().Add(lasts); ; {
		_, _ = in.admin().Exec(ctx, terminateSQL, many) // the other fault may be that there is no server
		if time.Now().After(until) || !sleep(ctx, 300*time.Millisecond) {
			return nil
		}
	}
}

func (in *injector) crash(ctx context.Context, lasts time.Duration, _ *worker, rng *rand.Rand) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	end := in.primary.Crash
	if rng.IntN(2) == 0 {
		end = in.primary.Kill
	}
	if err := end(); err != nil {
		return err
	}
	sleep(ctx, lasts)
	if err := in.primary.Restart(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	in.admin().Reset() // its connections have ended
	return nil
}

// promote loses the primary and makes the standby one.
func (in *injector) promote(ctx context.Context, lasts time.Duration, _ *worker, _ *rand.Rand) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.plan.Async {
		if err := in.standby.Detach(ctx); err != nil {
			return err
		}
		sleep(ctx, lasts) // for commits that get lost
	}
	ctx = context.WithoutCancel(ctx)
	if err := in.primary.Kill(); err != nil {
		return err
	}
	in.relays[0].Reset()
	if err := in.standby.Promote(ctx); err != nil {
		return err
	}
	in.primary, in.standby = in.standby, in.primary
	if in.pooler != nil {
		if err := in.pooler.Redirect(in.primary); err != nil {
			return err
		}
	}
	return in.connectAdmin(ctx)
}

func (in *injector) pausePooler(ctx context.Context, lasts time.Duration, _ *worker, _ *rand.Rand) error {
	if err := syscall.Kill(in.pooler.PID(), syscall.SIGSTOP); err != nil {
		return err
	}
	sleep(ctx, lasts)
	return syscall.Kill(in.pooler.PID(), syscall.SIGCONT)
}

// exhaust takes all connections that the server has for applications.
func (in *injector) exhaust(ctx context.Context, lasts time.Duration, _ *worker, _ *rand.Rand) error {
	var conns []*pgx.Conn
	defer func() {
		for _, conn := range conns {
			_ = conn.Close(context.WithoutCancel(ctx)) // the server may have gone
		}
	}()
	for until := time.Now().Add(lasts); time.Now().Before(until); {
		conn, err := in.connect(ctx)
		if err == nil {
			conns = append(conns, conn)
		} else if !sleep(ctx, 50*time.Millisecond) {
			return nil
		}
	}
	return nil
}

// fillLockTable locks until the server has no room for another lock.
func (in *injector) fillLockTable(ctx context.Context, lasts time.Duration, _ *worker, _ *rand.Rand) error {
	conn, err := in.connect(ctx)
	if err != nil {
		return nil // the other fault may be that there is no connection
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for until := time.Now().Add(lasts); time.Now().Before(until); {
		_, _ = conn.Exec(ctx, fillLockTableSQL) // fails in any case, and keeps the locks that it got
		if !sleep(ctx, 50*time.Millisecond) {
			return nil
		}
	}
	return nil
}

// jumpClock sets the server's clock ahead of the machine's, or back by more than the margin of a lease, and in the end right.
func (in *injector) jumpClock(ctx context.Context, lasts time.Duration, _ *worker, rng *rand.Rand) error {
	ahead := pick(rng, -5*time.Second, -300*time.Millisecond, 300*time.Millisecond, 5*time.Second)
	if err := in.setClock(ahead); err != nil {
		return err
	}
	sleep(ctx, lasts)
	return in.setClock(0)
}

// evict has an administrator evict holders, chosen at random.
func (in *injector) evict(ctx context.Context, lasts time.Duration, _ *worker, rng *rand.Rand) error {
	dice := rand.New(rand.NewPCG(rng.Uint64(), 0)) // of their own: the number of throws depends on the time
	var keys []string
	for n := range in.plan.Keys {
		keys = append(keys, keyOf(n))
	}
	for until := time.Now().Add(lasts); ; {
		m, err := monitor.New(in.admin(), &monitor.Config{Names: keys})
		if err != nil {
			return err
		}
		holders, _ := m.Holders(ctx, monitor.Filter{}) // the other fault may be that there is no server
		holders = slices.DeleteFunc(holders, func(h pgxlock.Holder) bool { return !strings.HasPrefix(h.ID, "worker-") })
		if len(holders) > 0 {
			in.evictOne(ctx, m, pick(dice, holders...))
		}
		if time.Now().After(until) || !sleep(ctx, 200*time.Millisecond) {
			return nil
		}
	}
}

func (in *injector) evictOne(ctx context.Context, m *monitor.Monitor, h pgxlock.Holder) {
	e := history.Event{What: history.FaultBegun, Fault: history.Evict, Op: in.op(), Holder: h.ID}
	e.Target, _, _ = strings.Cut(h.ID, ".")
	e.Key, _, _ = strings.Cut(h.Key, "#") // of a semaphore
	in.history.Write(e)
	evicted, err := m.Evict(ctx, h, "chaos")
	if err == nil && !evicted {
		err = errors.New("it was not the holder any more")
	}
	if e.What = history.FaultEnded; err != nil {
		e.Err = err.Error()
	}
	in.history.Write(e)
}

// sleep returns false if ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
