// Package once runs a job once in each period, or once for each tick of a schedule, over
// all processes that use the same database.
//
//	daily, err := once.New(pool, 24*time.Hour, nil) // one for all jobs of this period
//
//	ran, err := daily.Do(ctx, "report", func(ctx context.Context, run once.Run) error {
//		return report(ctx, run.Slot)
//	})
//
// # Choosing a call
//
//	a scheduler calls in each period        Runner.Do
//	a scheduler knows its tick              Runner.DoAt
//	no scheduler: run in every period       Runner.Run
//	test without a server                   NewMemory
//
// # The life of a run
//
// A run is a row of the table pgxlock_runs, for its key and its period; [List] returns them:
//
//	free --- a start commits ----> running --- fn returns nil -------> succeeded
//	 ^                              |  ^ |---- fn fails or panics ---> failed ----+
//	 |                              |  | +---- its process dies -----> abandoned -+
//	 +--- withdrawn: its caller ----+  |                                          |
//	 |    left before the answer       +------ with Retry: the next start --------+
//	 |
//	 +--- skipped: with FirstNext, the period that was under way when the key was new
//
// The table records an abandoned run as running. Without a lease nobody can tell the two
// apart, and an abandoned run is never started again. With Retry a run holds a lease while
// it runs: once the lease has expired, the run is known to be abandoned.
//
// # Connections
//
// A [Runner] has one connection of its own, for the table. With Retry it also has a Locker
// for the leases, with one connection. [NewMemory] keeps runs in this process, for tests.
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
// processes that ask for it. Make one with [New], or with [NewMemory] in a program's own
// tests. It is safe for concurrent use, and serves any number of keys. The zero value is
// not usable.
//
// The row of a run is committed before the job begins. So a job that is over before another
// process asks for it is not run again. A lock that is held only while the job runs cannot
// prevent that. The server's clock decides which period it is; the clocks of the processes
// do not matter.
//
// How a run ends:
//
//	                     without Retry            with Retry
//	fn returns nil       succeeded, for good      succeeded, for good
//	fn returns an error  failed, for good         failed; the next Do starts it again
//	fn panics            failed, for good         failed; the next Do starts it again
//	the process dies     "running", for good:     when its lease has expired the next
//	                     not started again        Do starts it again
//	the lease is lost    there is no lease        fn's context ends, and another attempt
//	                                              may be started; if several succeed, one
//	                                              is recorded, the others get pgxlock.ErrLost
//	nobody asks          missed; see CatchUp      missed; see CatchUp
//
// Without Retry a run is started at most once, and exactly once unless its process dies or
// never receives the answer that it may start. With Retry a run succeeds once, and may be
// started more than once: write in a transaction that begins with [pgxlock.Lock.Fence], or
// make the work safe to repeat.
type Runner struct {
	cfg   Config
	slots slots
	runs  runs
	locks *pgxlock.Locker // for the leases of runs; nil without Retry

	mu     sync.Mutex        // never held together with that of the runs
	unsure map[string]string // by key, the holder of a start with an unknown outcome
	warned map[string]bool   // keys for which other programs use another period

	calls     batcher.Calls
	closeOnce sync.Once
	closed    chan struct{} // closed when the connections are closed, after closeErr is set
	closeErr  error
}

// A Run is one run of a job.
type Run struct {
	Key string

	// Slot identifies the run: it is the beginning of its period, in the Location of the
	// Config, or the tick that was passed to [Runner.DoAt]. Yesterday's report is that of
	// the day before Slot, however late the run is.
	Slot time.Time

	// Attempt is how often the run has been started; without Retry it is 1.
	Attempt int

	// Lock is the lease that the run holds, with [Config].Retry; otherwise nil.
	Lock *pgxlock.Lock
}

// New returns a Runner for jobs that run once in each period. Periods begin at multiples of
// period since the year 1, as [time.Time.Truncate] counts, plus cfg.Offset; periods of whole
// days begin at midnight by the clocks of cfg.Location, and weeks on Monday. period is
// between 1 ms and 3650 days, in whole microseconds. The Runner needs the migrations
// ([pgxlock.ErrSchema]).
//
// The Runner takes only its configuration from the pool, never a connection. It has one
// connection of its own, and with cfg.Retry one more for the leases of runs. It connects at
// its first use; [Runner.Close] closes the connections.
func New(pool *pgxpool.Pool, period time.Duration, cfg *Config) (*Runner, error) {
	r, err := newRunner(period, cfg)
	if err != nil {
		return nil, fail("new", "", err)
	}
	if pool == nil {
		return nil, fail("new", "", errors.New("the pool is nil; make one with pgxpool.New"))
	}
	if r.cfg.Retry {
		r.locks, err = pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{OneConnection: true, TTL: r.cfg.TTL, Owner: r.cfg.Owner, Schema: r.cfg.Schema, Backoff: r.cfg.Backoff, Logger: r.cfg.Logger})
		if err != nil {
			return nil, fail("new", "", err)
		}
	}
	r.runs = newTable(pool.Config(), r.cfg, r.slots)
	return r, nil
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
		warned: make(map[string]bool),
		calls:  batcher.NewCalls(),
		closed: make(chan struct{}),
	}, nil
}

// Do runs fn if this is the first call for the key in the current period, by the server's
// clock. With [Config].Retry it also runs fn if the run of this period has failed or its
// process has died. ran reports whether fn was called. ran is false and err nil if another
// call has started the run, whether or not it is over: Do does not wait for it.
//
// fn's context ends when ctx does, when the Runner is closed and, with Retry, when the
// lease is lost. A run goes on when its period is over; the next run does not wait for it.
// Do returns fn's error. If fn panics, the run is recorded as failed, and the panic goes on.
//
// If ran is false, an error is an [*pgxlock.Error]: [pgxlock.ErrSchema],
// [pgxlock.ErrReadOnly], [pgxlock.ErrClosed], or the error of the server or the network. If
// the answer to a start was lost, the run may be recorded as started. The next Do for the
// key in this process finds out, and runs it; if this process does not ask again, nobody
// runs it.
//
// If ran is true, the error is fn's. With Retry it is joined with the reason if the end was
// not recorded: [pgxlock.ErrLost] means that another attempt was started before, and after
// any other reason the job may run again. Without Retry the Logger receives that reason.
// Recording is tried for 5 s.
func (r *Runner) Do(ctx context.Context, key string, fn func(ctx context.Context, run Run) error) (ran bool, err error) {
	return r.do(ctx, key, which{}, fn)
}

// DoAt is [Runner.Do] for a scheduler that knows for which time it calls: it runs fn once
// for each key and tick, exact to the microsecond, whenever the calls come. So any schedule
// works, such as the first of each month, and the clocks of the processes may differ by more
// than the time between two ticks.
//
// The tick must be the same in all processes: the time that the schedule says, not the time
// of the call. A cron callback that is not passed its tick must not pass time.Now, which is
// another tick in each process. Use [Runner.Do] there, or round the time of the call to the
// distance between two ticks: time.Now().Round(time.Minute) for a job of each minute. Round, do
// not truncate: a process whose clock is a little early would name the tick before.
//
// DoAt returns a [*TickError] for what cannot be a tick: the zero time, a reading of the clock
// as time.Now and time.Ticker return it, and a tick that is older than [Config].Keep by the
// server's clock, or further ahead than that, because nobody knows whether it was run.
func (r *Runner) DoAt(ctx context.Context, key string, tick time.Time, fn func(ctx context.Context, run Run) error) (ran bool, err error) {
	if err := missing(ctx, r == nil); err != nil {
		return false, fail("once", key, err)
	}
	if err := checkTick(tick); err != nil {
		return false, fail("once", key, err)
	}
	return r.do(ctx, key, which{slot: tick.Truncate(time.Microsecond), tick: true}, fn)
}

// Close refuses new calls, ends the contexts of runs with cause [pgxlock.ErrClosed], waits
// for the runs until ctx ends, and closes the connections. If ctx ends first, Close returns
// its error, and the rest happens in the background, in bounded time. The end of a run that
// still goes on then is not recorded; with Retry nobody else runs it before its lease expires.
// Do not call Close inside fn: it would wait for fn.
func (r *Runner) Close(ctx context.Context) error {
	if err := missing(ctx, r == nil); err != nil {
		return fail("close", "", err)
	}
	r.closeOnce.Do(func() {
		r.calls.Close()
		go func() {
			defer close(r.closed)
			r.closeErr = r.shutdown(ctx)
		}()
	})
	select {
	case <-r.closed:
		return fail("close", "", r.closeErr)
	case <-ctx.Done():
		return fail("close", "", lockerr.ContextError(ctx))
	}
}

// shutdown waits for the calls until ctx ends, and closes the connections.
func (r *Runner) shutdown(ctx context.Context) (err error) {
	if r.locks != nil {
		err = r.locks.Close(ctx) // ends the contexts of runs; a run that goes on keeps its lease until that expires
	}
	idle := make(chan struct{})
	go func() {
		defer close(idle)
		r.calls.Wait()
	}()
	select {
	case <-idle:
	case <-ctx.Done():
		err = cmp.Or(err, lockerr.ContextError(ctx))
	}
	r.runs.close()
	return err
}

func (r *Runner) do(ctx context.Context, key string, w which, fn func(context.Context, Run) error) (bool, error) {
	if err := r.begin(ctx, key, fn); err != nil {
		return false, fail("once", key, err)
	}
	defer r.calls.End()
	if w.first = FirstNow; !w.tick {
		w.first = cmp.Or(r.cfg.First, FirstNow)
	}
	o := r.observeRun(ctx, key, w.slot)
	if r.cfg.Retry && w.slot.IsZero() { // the name of the lease contains the slot
		due, _, err := r.due(ctx, key, 0, w.first)
		if err != nil {
			err = fail("once", key, err)
			o.notStarted(err)
			return false, err
		}
		current := due[len(due)-1]
		o.of(current.slot)
		if !current.due {
			o.notStarted(nil)
			return false, nil
		}
		w.slot = current.slot
	}
	return r.perform(ctx, key, w, fn, o)
}

// begin checks the arguments that all calls have, and counts the call.
func (r *Runner) begin(ctx context.Context, key string, fn func(context.Context, Run) error) error {
	if err := cmp.Or(missing(ctx, r == nil), checkRunKey(key)); err != nil {
		return err
	}
	if fn == nil {
		return errors.New("fn is nil; pass the function to run")
	}
	if ctx.Err() != nil {
		return lockerr.ContextError(ctx)
	}
	return r.calls.Begin()
}

// maxRunKey is shorter than a lease's name may be, because that of a run adds the slot.
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

// leaseName returns the name of a run's lease, as operators see it.
func leaseName(key string, slot time.Time) string {
	return "run:" + key + "@" + slot.UTC().Format("2006-01-02T15:04:05.999999Z")
}

// perform runs fn if the run may be started.
func (r *Runner) perform(ctx context.Context, key string, w which, fn func(context.Context, Run) error, o *observedRun) (bool, error) {
	ran, err := r.try(ctx, key, w, fn, o)
	if !ran {
		o.notStarted(err)
	}
	return ran, err
}

// try is perform, with Retry under a lease.
func (r *Runner) try(ctx context.Context, key string, w which, fn func(context.Context, Run) error, o *observedRun) (ran bool, err error) {
	if !r.cfg.Retry {
		work, cancel := r.untilClosed(ctx)
		defer cancel()
		return r.attempt(ctx, work, Run{Key: key}, w, fn, o)
	}
	if err := r.find(ctx); err != nil {
		return false, fail("once", key, err)
	}
	started := false
	_, refused := r.locks.TryDo(ctx, leaseName(key, w.slot), func(work context.Context, lock *pgxlock.Lock) error {
		started = true
		ran, err = r.attempt(ctx, work, Run{Key: key, Lock: lock}, w, fn, o)
		return nil
	})
	if !started { // no error: the lease is held by a call that runs it, or checks whether it may
		return false, fail("once", key, refused)
	}
	// TryDo also says if the lease was lost, but the row of the run has decided already
	// whether this attempt counts.
	return ran, err
}

// attempt starts a run if it may be started, runs fn with the context work, and records
// how it ended. ctx bounds the wait for the start.
func (r *Runner) attempt(ctx, work context.Context, run Run, w which, fn func(context.Context, Run) error, o *observedRun) (ran bool, err error) {
	key, lease := run.Key, run.Lock.Key()
	holder := run.Lock.Holder()
	if run.Lock == nil {
		holder = r.holder(key)
	}

	started, err := r.start(ctx, key, w, holder, lease)
	if lockerr.SQLState(err) == lockerr.StateNotHeld {
		err = fmt.Errorf("%w: %w", lockerr.ErrGrantLost, err) // the lease expired first, as after a freeze; nothing was started
	}
	if err != nil {
		return false, fail("once", key, err)
	}
	r.warn(key, started.other)
	if started.attempt == 0 {
		return false, nil
	}
	run.Slot, run.Attempt = started.slot.In(r.cfg.Location), started.attempt
	o.started(run, holder)

	returned := false
	defer func() {
		if returned {
			return
		}
		o.returned()
		why, text := recover(), "it called runtime.Goexit"
		if why != nil {
			text = fmt.Sprint("panic: ", why)
		}
		if err := r.record(run, holder, runFailed, text); err != nil {
			r.cfg.Logger.Warn("pgxlock: the end of a run could not be recorded", "key", key, "slot", run.Slot, "error", err)
		}
		o.ended(errors.New(text))
		if why != nil {
			panic(why)
		}
	}()
	err = fn(work, run)
	returned = true
	o.returned()
	defer func() { o.ended(err) }()

	state, text := runSucceeded, ""
	if err != nil {
		state, text = runFailed, err.Error()
	}
	if recorded := r.record(run, holder, state, text); recorded != nil {
		if !r.cfg.Retry { // the run is never started again, recorded or not
			r.cfg.Logger.Warn("pgxlock: the end of a run could not be recorded", "key", key, "slot", run.Slot, "error", recorded)
			return true, err
		}
		return true, errors.Join(err, fail("once", key, recorded))
	}
	return true, err
}

// warn logs, once for each key, that another program uses another period for it; nil: none does.
func (r *Runner) warn(key string, other *Schedule) {
	if other == nil {
		return
	}
	r.mu.Lock()
	first := !r.warned[key]
	r.warned[key] = true
	r.mu.Unlock()
	if first {
		own := Schedule{r.slots.period, r.slots.offset, r.slots.location.String()}
		r.cfg.Logger.Warn("pgxlock: programs use different periods for one key; give them the same period, offset and time zone, or different keys",
			"key", key, "period", own, "other", *other)
	}
}

// untilClosed returns a context that ends with ctx and when the Runner is closed.
func (r *Runner) untilClosed(ctx context.Context) (context.Context, context.CancelFunc) {
	inner, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(r.calls.Closing(), func() { cancel(lockerr.ErrClosed) })
	return inner, func() {
		stop()
		cancel(nil)
	}
}

// holder returns the holder for the next start of the key: a new one, or that of an earlier
// start with an unknown outcome, whose run has not begun.
func (r *Runner) holder(key string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if holder, ok := r.unsure[key]; ok {
		delete(r.unsure, key)
		return holder
	}
	return r.cfg.Owner + ":" + rand.Text()
}

// find makes sure that the schema is known before the Locker looks for it: an error then
// names the field of Config, and not that of LeaseConfig.
func (r *Runner) find(ctx context.Context) error {
	err, left := batcher.Await(ctx, &r.calls, func() error { return r.runs.find(ctx) }, func(error) {})
	return cmp.Or(err, left)
}

// due asks which slots may be started, until ctx ends.
func (r *Runner) due(ctx context.Context, key string, missed int, first First) ([]dueSlot, time.Duration, error) {
	type answer struct {
		due   []dueSlot
		lasts time.Duration
		err   error
	}
	a, err := batcher.Await(ctx, &r.calls, func() (a answer) {
		a.due, a.lasts, a.err = r.runs.due(ctx, key, missed, first)
		return a
	}, func(answer) {})
	if err != nil {
		return nil, 0, err
	}
	if len(a.due) > 0 {
		r.warn(key, a.due[len(a.due)-1].other) // those of missed slots may be from before a change
	}
	return a.due, a.lasts, a.err
}

// start asks to start a run, until ctx ends. A start whose caller has left is withdrawn; one
// with an unknown outcome is remembered for the next call of the key.
func (r *Runner) start(ctx context.Context, key string, w which, holder, lease string) (startedRun, error) {
	type answer struct {
		startedRun
		err error
	}
	a, err := batcher.Await(ctx, &r.calls, func() (a answer) {
		var unsure bool
		a.startedRun, unsure, a.err = r.runs.start(ctx, key, w, holder, lease)
		if unsure && lease == "" {
			r.mu.Lock()
			r.unsure[key] = holder
			r.mu.Unlock()
		}
		return a
	}, func(a answer) {
		if a.attempt == 0 {
			return
		}
		if _, err := r.runs.finish(key, a.slot, holder, runWithdrawn, ""); err != nil {
			r.cfg.Logger.Warn("pgxlock: a run whose caller had left could not be withdrawn", "key", key, "slot", a.slot, "error", err)
		}
	})
	if err != nil {
		return startedRun{}, err
	}
	return a.startedRun, a.err
}

// recordPatience is for how long recording the end of a run is tried.
const recordPatience = 5 * time.Second

// record records how a run ended. It returns ErrLost if another attempt was started.
func (r *Runner) record(run Run, holder, state, text string) error {
	giveUp := time.Now().Add(recordPatience)
	for attempt := 0; ; attempt++ {
		last, err := r.runs.finish(run.Key, run.Slot, holder, state, text)
		switch {
		case err == nil && !last:
			return fmt.Errorf("%w: a later attempt has started than attempt %d, or the run is no longer remembered", lockerr.ErrLost, run.Attempt)
		case err == nil:
			return nil
		case !lockerr.Transient(err) || time.Now().After(giveUp):
			return fmt.Errorf("the run ended, but this could not be recorded: %w", err)
		}
		time.Sleep(backoff(attempt))
	}
}

// fail makes the error that a call returns; nil if err is nil.
func fail(op, key string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*pgxlock.Error](err); ok { // from the Locker
		err = e.Err
	}
	return &pgxlock.Error{Op: op, Key: key, Err: lockerr.Typed(lockerr.Locked(err))}
}

// missing returns an error if the receiver or the context of a method is nil.
func missing(ctx context.Context, isNil bool) error {
	if isNil {
		return errors.New("the Runner is nil; make one with once.New")
	}
	return lockerr.MissingContext(ctx)
}
