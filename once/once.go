// Package once runs a job once in each period, or once for each tick of a schedule, over all
// processes that use the same database.
//
//	daily, err := once.New(pool, 24*time.Hour, nil) // one for all jobs of this period
//
//	ran, err := daily.Do(ctx, "report", func(ctx context.Context, run once.Run) error {
//		return report(ctx, run.Slot)
//	})
package once

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A Runner runs a job once in each period, or once for each tick of a schedule, over all
// processes that ask for it. [New] makes it, and for a program's own tests
// [NewMemory]. It is safe for concurrent use; one serves any number of keys. The zero
// value is of no use.
//
// A run is a row of the table pgxlock_runs, and committed before the job begins. So a
// job that is over before another process's clock strikes is not run again, which a
// lock that is held while it runs cannot prevent. Which period it is the server's
// clock says, for everybody; the clocks of the processes do not matter.
//
// What may become of a run:
//
//	                     without Retry            with Retry
//	fn returns nil       succeeded, for good      succeeded, for good
//	fn returns an error  failed, for good         failed; the next Do starts it again
//	fn panics            failed, for good         failed; the next Do starts it again
//	the process dies     stays "running", for     when its lease has run out the next
//	                     good: not started again  Do starts it again
//	the lease is lost    there is none            fn's context ends, and another attempt
//	                                              may be started; of several that end well
//	                                              one is recorded, the others get pgxlock.ErrLost
//	nobody asks          missed; see CatchUp      missed; see CatchUp
//
// So without Retry a run is started at most once: exactly once unless its process dies,
// or never hears that it may start. With Retry it succeeds once, and may be begun more
// often: what it writes should be in a transaction that begins with [pgxlock.Lock.Fence], or
// bear repeating.
type Runner struct {
	cfg   Config
	slots slots
	runs  runs
	locks *pgxlock.Locker // has the leases of runs; nil without Retry

	mu     sync.Mutex
	unsure map[string]string // by key, the holder of a start of which no answer came

	calls     batcher.Calls
	closeOnce sync.Once
	closed    chan struct{} // closed when the connections have gone, after closeErr is set
	closeErr  error
}

// Run is one run of a job.
type Run struct {
	Key string

	// Slot is which run it is: the beginning of its period, in the Location of the
	// configuration, or the tick that was given to [Runner.DoAt]. A report of
	// yesterday is one of the day before Slot, however late it is made.
	Slot time.Time

	// Attempt is 1, or with Retry how often the run was started.
	Attempt int

	// Lock is the lease that is held while the run lasts, with [Config].Retry;
	// else nil.
	Lock *pgxlock.Lock
}

// runs is where runs are recorded.
type runs interface {
	// find makes sure that it is known where they are.
	find() error

	// due returns the current slot, and before it, oldest first, those of the last
	// so many that were missed; and how long the current one lasts yet.
	due(key string, missed int) (found []dueSlot, lasts time.Duration, err error)

	// start starts a run in the slot, or in the current one if it is zero, unless the
	// attempt that it returns is 0. lease is what the holder has; "" if the run may
	// not be started again. With unsure it may have been started although there is
	// an error; the same holder finds out by starting it again.
	start(key string, slot time.Time, holder, lease string) (started startedRun, unsure bool, err error)

	// finish records how an attempt ended, and reports whether it was the last one.
	finish(key string, slot time.Time, holder, state, text string) (bool, error)

	// close ends the traffic. Nothing can be recorded any more.
	close()
}

type dueSlot struct {
	slot time.Time
	due  bool
}

type startedRun struct {
	slot    time.Time
	attempt int
}

// What is recorded of a run.
const (
	runRunning   = "running"
	runSucceeded = "succeeded"
	runFailed    = "failed"
	runWithdrawn = "withdrawn" // as if it had not been started
)

// New returns a Runner for jobs that run once in each period, which begins at a
// multiple of period since the year 1, as [time.Time.Truncate] counts, plus
// cfg.Offset; a period of whole days at midnight by the clocks of cfg.Location, and
// weeks on Monday. period is at least 1 ms, in whole microseconds. It needs the
// migrations ([pgxlock.ErrSchema]).
//
// The pool gives its configuration only: the Runner has a connection of its own, and
// with cfg.Retry two more, those of the Locker that has the leases. Nothing is sent
// before the first use. [Runner.Close] ends them.
func New(pool *pgxpool.Pool, period time.Duration, cfg *Config) (*Runner, error) {
	o, err := newRunner(period, cfg)
	if err != nil {
		return nil, fail("new", "", err)
	}
	if pool == nil {
		return nil, fail("new", "", errors.New("the pool is nil; make one with pgxpool.New"))
	}
	if o.cfg.Retry {
		o.locks, err = pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: o.cfg.TTL, Owner: o.cfg.Owner, Schema: o.cfg.Schema, Backoff: o.cfg.Backoff, Logger: o.cfg.Logger})
		if err != nil {
			return nil, fail("new", "", err)
		}
	}
	o.runs = newTable(pool.Config(), o)
	return o, nil
}

func newRunner(period time.Duration, config *Config) (*Runner, error) {
	cfg, err := config.withDefaults(period)
	if err != nil {
		return nil, err
	}
	return &Runner{
		cfg:    cfg,
		slots:  slots{period, cfg.Offset, cfg.Location},
		unsure: make(map[string]string),
		calls:  batcher.NewCalls(),
		closed: make(chan struct{}),
	}, nil
}

// Do runs fn if this is the first call for the key in the current period, by the
// server's clock; with [Config].Retry also if the run of this period has failed or
// its process has died. ran reports whether fn was called. It is false with no error if
// another call has started the run, whether or not it is over: that is not waited for.
//
// fn's context ends when ctx does, when the Runner is closed, and, with Retry, when the
// lease is lost. The run goes on when its period is over; the next one does not wait
// for it. Do returns fn's error. If fn panics the run is recorded as failed, and the
// panic goes on.
//
// With ran = false an error is an [*pgxlock.Error], and fn was not called: [pgxlock.ErrSchema],
// [pgxlock.ErrReadOnly], [pgxlock.ErrClosed], or what the server or the network said. If the answer to a
// start was lost the run may stand as started; the next Do of the key here finds out,
// and runs it; a process that does not ask again leaves it unrun. With Retry and ran =
// true an error that matches [pgxlock.ErrLost] means that another attempt was started before
// this one could be recorded; one that does not match fn's says why its end could not
// be recorded, so that it may be run again. Recording is tried for 5 s.
func (o *Runner) Do(ctx context.Context, key string, fn func(ctx context.Context, run Run) error) (ran bool, err error) {
	return o.do(ctx, key, time.Time{}, fn)
}

// DoAt is [Runner.Do] for a scheduler that knows for which time it calls: fn is run
// once for each key and tick, exact to the microsecond, whenever the calls come. So
// the schedule may be anything, such as the first of each month, and the processes'
// clocks may differ by more than the time between two ticks.
//
// A tick that is older than [Config].Keep by the server's clock, or further ahead,
// is refused: nobody knows any more whether it was run.
func (o *Runner) DoAt(ctx context.Context, key string, tick time.Time, fn func(ctx context.Context, run Run) error) (ran bool, err error) {
	if err := missing(ctx, o == nil); err != nil {
		return false, fail("once", key, err)
	}
	if tick.IsZero() {
		return false, fail("once", key, errors.New("tick is the zero time; pass the time for which the scheduler calls"))
	}
	return o.do(ctx, key, tick.Truncate(time.Microsecond), fn)
}

// Close refuses new calls, ends the contexts of runs with cause [pgxlock.ErrClosed], waits for
// them until ctx ends, and ends the connections. It returns ctx's error if that came
// first; what still runs then can not be recorded. Do not call it inside fn, which it
// would wait for.
func (o *Runner) Close(ctx context.Context) error {
	if err := missing(ctx, o == nil); err != nil {
		return fail("close", "", err)
	}
	o.closeOnce.Do(func() {
		o.calls.Close()
		go func() {
			defer close(o.closed)
			o.closeErr = o.shutdown(ctx)
		}()
	})
	select {
	case <-o.closed:
		return fail("close", "", o.closeErr)
	case <-ctx.Done():
		return fail("close", "", lockerr.ContextError(ctx))
	}
}

// shutdown waits for the calls until ctx ends, and ends the connections.
func (o *Runner) shutdown(ctx context.Context) (err error) {
	if o.locks != nil {
		err = o.locks.Close(ctx) // ends the contexts of runs under a lease; one that goes on keeps others out until that runs out
	}
	idle := make(chan struct{})
	go func() {
		defer close(idle)
		o.calls.Wait()
	}()
	select {
	case <-idle:
	case <-ctx.Done():
		err = cmp.Or(err, lockerr.ContextError(ctx))
	}
	o.runs.close()
	return err
}

func (o *Runner) do(ctx context.Context, key string, slot time.Time, fn func(context.Context, Run) error) (bool, error) {
	if err := o.begin(ctx, key, fn); err != nil {
		return false, fail("once", key, err)
	}
	defer o.calls.End()
	if o.cfg.Retry && slot.IsZero() { // its lease has the slot in its name
		due, _, err := o.due(ctx, key, 0)
		if err != nil {
			return false, fail("once", key, err)
		}
		current := due[len(due)-1]
		if !current.due {
			return false, nil
		}
		slot = current.slot
	}
	return o.perform(ctx, key, slot, fn)
}

// begin checks what every call is given, and counts the call.
func (o *Runner) begin(ctx context.Context, key string, fn func(context.Context, Run) error) error {
	if err := cmp.Or(missing(ctx, o == nil), checkRunKey(key)); err != nil {
		return err
	}
	if fn == nil {
		return errors.New("fn is nil; pass what is to be run")
	}
	if ctx.Err() != nil {
		return lockerr.ContextError(ctx)
	}
	return o.calls.Begin()
}

// maxRunKey leaves room for the name of a run's lease.
const maxRunKey = 200

func checkRunKey(key string) error {
	if err := lockkey.Check(key); err != nil {
		return err
	}
	if n := utf8.RuneCountInString(key); n > maxRunKey {
		return fmt.Errorf("the key has %d characters, %d are allowed for runs; shorten it, for example by a hash", n, maxRunKey)
	}
	return nil
}

// leaseName is the lease of a run, as operators see it.
func leaseName(key string, slot time.Time) string {
	return "run:" + key + "@" + slot.UTC().Format("2006-01-02T15:04:05.999999Z")
}

// perform starts a run if it may be started, and does it.
func (o *Runner) perform(ctx context.Context, key string, slot time.Time, fn func(context.Context, Run) error) (ran bool, err error) {
	if !o.cfg.Retry {
		work, cancel := o.untilClosed(ctx)
		defer cancel()
		return o.attempt(ctx, work, Run{Key: key}, slot, fn)
	}
	if err := o.find(ctx); err != nil {
		return false, fail("once", key, err)
	}
	started := false
	_, refused := o.locks.TryDo(ctx, leaseName(key, slot), func(work context.Context, lock *pgxlock.Lock) error {
		started = true
		ran, err = o.attempt(ctx, work, Run{Key: key, Lock: lock}, slot, fn)
		return nil
	})
	if !started { // with no error it runs, or somebody looks whether it has
		return false, fail("once", key, refused)
	}
	return ran, err // that of two attempts one ended the run is known from its row, not from its lease
}

// attempt starts a run if it may be started, before ctx ends, and runs fn in the context
// work.
func (o *Runner) attempt(ctx, work context.Context, run Run, slot time.Time, fn func(context.Context, Run) error) (ran bool, err error) {
	key, lease := run.Key, run.Lock.Key()
	holder := run.Lock.Holder()
	if run.Lock == nil {
		holder = o.holder(key)
	}

	started, err := o.start(ctx, key, slot, holder, lease)
	if lockerr.SQLState(err) == lockerr.StateNotHeld {
		err = fmt.Errorf("%w: %w", lockerr.ErrGrantLost, err) // its lease, as after a freeze: nothing was begun under it
	}
	if err != nil {
		return false, fail("once", key, err)
	}
	if started.attempt == 0 {
		return false, nil
	}
	run.Slot, run.Attempt = started.slot.In(o.cfg.Location), started.attempt

	returned := false
	defer func() {
		if returned {
			return
		}
		why, text := recover(), "it called runtime.Goexit"
		if why != nil {
			text = fmt.Sprint("panic: ", why)
		}
		if err := o.record(run, holder, runFailed, text); err != nil {
			o.cfg.Logger.Warn("pgxlock: the end of a run could not be recorded", "key", key, "slot", run.Slot, "error", err)
		}
		if why != nil {
			panic(why)
		}
	}()
	err = fn(work, run)
	returned = true

	state, text := runSucceeded, ""
	if err != nil {
		state, text = runFailed, err.Error()
	}
	if recorded := o.record(run, holder, state, text); recorded != nil {
		if !o.cfg.Retry { // nothing depends on it
			o.cfg.Logger.Warn("pgxlock: the end of a run could not be recorded", "key", key, "slot", run.Slot, "error", recorded)
			return true, err
		}
		return true, errors.Join(err, fail("once", key, recorded))
	}
	return true, err
}

// untilClosed returns a context that ends with ctx and when the Runner is closed.
func (o *Runner) untilClosed(ctx context.Context) (context.Context, context.CancelFunc) {
	inner, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(o.calls.Closing(), func() { cancel(lockerr.ErrClosed) })
	return inner, func() {
		stop()
		cancel(nil)
	}
}

// holder returns the holder of the next start of the key: one of its own, or that of
// an earlier start of which no answer came, whose run has not begun.
func (o *Runner) holder(key string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if holder, ok := o.unsure[key]; ok {
		delete(o.unsure, key)
		return holder
	}
	return o.cfg.Owner + ":" + rand.Text()
}

// find makes sure that it is known where runs are recorded, before the Locker looks for
// that: what is wrong then is the Config's, and not that of a lease.
func (o *Runner) find(ctx context.Context) error {
	err, left := batcher.Await(ctx, &o.calls, o.runs.find, func(error) {})
	return cmp.Or(err, left)
}

// due asks which slots may be started.
func (o *Runner) due(ctx context.Context, key string, missed int) ([]dueSlot, time.Duration, error) {
	type answer struct {
		due   []dueSlot
		lasts time.Duration
		err   error
	}
	a, err := batcher.Await(ctx, &o.calls, func() (a answer) {
		a.due, a.lasts, a.err = o.runs.due(key, missed)
		return a
	}, func(answer) {})
	if err != nil {
		return nil, 0, err
	}
	return a.due, a.lasts, a.err
}

// start asks to start a run. Nothing is started if it returns an error, as far as the
// answer tells.
func (o *Runner) start(ctx context.Context, key string, slot time.Time, holder, lease string) (startedRun, error) {
	type answer struct {
		startedRun
		err error
	}
	a, err := batcher.Await(ctx, &o.calls, func() (a answer) {
		var unsure bool
		a.startedRun, unsure, a.err = o.runs.start(key, slot, holder, lease)
		if unsure && lease == "" {
			o.mu.Lock()
			o.unsure[key] = holder
			o.mu.Unlock()
		}
		return a
	}, func(a answer) {
		if a.attempt == 0 {
			return
		}
		if _, err := o.runs.finish(key, a.slot, holder, runWithdrawn, ""); err != nil {
			o.cfg.Logger.Warn("pgxlock: a run that was started for nobody could not be taken back", "key", key, "slot", a.slot, "error", err)
		}
	})
	if err != nil {
		return startedRun{}, err
	}
	return a.startedRun, a.err
}

// recordPatience is how long it is tried to record how a run ended.
const recordPatience = 5 * time.Second

// record records how a run ended. ErrLost: another attempt was started.
func (o *Runner) record(run Run, holder, state, text string) error {
	giveUp := time.Now().Add(recordPatience)
	for attempt := 0; ; attempt++ {
		last, err := o.runs.finish(run.Key, run.Slot, holder, state, text)
		switch {
		case err == nil && !last:
			return fmt.Errorf("%w: attempt %d is not the last one, or the run was forgotten", lockerr.ErrLost, run.Attempt)
		case err == nil:
			return nil
		case !lockerr.Transient(err) || time.Now().After(giveUp):
			return fmt.Errorf("the run ended, which could not be recorded: %w", err)
		}
		time.Sleep(backoff(attempt))
	}
}

// fail makes the error that a call returns; nil of nil.
func fail(op, key string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*pgxlock.Error](err); ok { // of the lease
		err = e.Err
	}
	return &pgxlock.Error{Op: op, Key: key, Err: lockerr.Typed(err)}
}

// missing returns what keeps a method from doing anything: a nil receiver, or a nil context.
func missing(ctx context.Context, isNil bool) error {
	if isNil {
		return errors.New("the Runner is nil; make one with once.New")
	}
	return lockerr.MissingContext(ctx)
}
