// Package gocronlock makes the schedulers of several processes, of
// github.com/go-co-op/gocron/v2, run each job once.
//
// A Locker of gocron that only holds a lock while the job runs lets a job that is over
// in a millisecond run once in each process: every scheduler whose clock is a little
// later finds the lock free. A [Locker] of this package remembers for which time the job
// was run. An [Elector] lets one process run all jobs.
package gocronlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/once"
)

var (
	// ErrTaken means that another scheduler runs the job this time, or has run it.
	ErrTaken = errors.New("gocronlock: another scheduler runs the job this time")

	// ErrNotLeader means that another process is the leader.
	ErrNotLeader = errors.New("gocronlock: another process is the leader")
)

var (
	_ gocron.Locker  = (*Locker)(nil)
	_ gocron.Elector = (*Elector)(nil)
)

// A Locker is a gocron.Locker for jobs that run once in each period, over all schedulers
// whose Lockers have the same period and offset. gocron passes only the name of the job:
// neither the time that the call is for, nor how the job ends. So the Locker uses the
// server's clock, and takes each call to be for the nearest time at which the job is due.
// No scheduler's clock may be wrong by half a period or more.
//
// Jobs are identified by name: name them with gocron.WithName.
type Locker struct {
	runner *once.Runner
}

// NewLocker returns a Locker for jobs that are due every interval, counted as [once.New]
// does: an hourly job at the full hour, a daily one at midnight, or cfg.Offset later. Start
// the jobs at these times, with gocron.WithStartAt: a job that begins half a period off may
// be skipped now and then. A job with another period needs another Locker: pass it to the
// job with gocron.WithDistributedJobLocker. Jobs that are due once a month, or on some days
// of the week, have no period: use an [Elector], or call [once.Runner.DoAt] in the job, with
// the time at which it is due. gocron passes none, and time.Now, which is another time in
// each process, is refused: compute the nearest due time.
//
// The first call for a job runs it, because gocron calls when it is due. Leave cfg.First out:
// once.FirstNext would skip the first due time.
//
// cfg is as for once.New, but Retry and CatchUp are refused: gocron neither asks again nor
// lets a job be stopped. [Locker.Close] closes the connection.
func NewLocker(pool *pgxpool.Pool, every time.Duration, cfg *once.Config) (*Locker, error) {
	var config once.Config
	if cfg != nil {
		config = *cfg
	}
	if config.Retry || config.CatchUp != 0 {
		return nil, fmt.Errorf("gocronlock: gocron does not support Retry and CatchUp; remove them, or use package once: %w", errors.ErrUnsupported)
	}
	if config.Offset >= 0 && config.Offset < every { // else it is refused as it is
		// The period of a due time is from half a period before to half a period after.
		config.Offset = ((config.Offset + every/2) % every).Truncate(time.Microsecond)
	}
	runner, err := once.New(pool, every, &config)
	if err != nil {
		return nil, err
	}
	return &Locker{runner: runner}, nil
}

// Lock returns nil for exactly one of all calls for the job in this period, and ErrTaken
// for the others. Any other error means that this is unknown.
func (l *Locker) Lock(ctx context.Context, name string) (gocron.Lock, error) {
	k := &lock{unlocked: make(chan struct{}), done: make(chan struct{})}
	started := make(chan struct{})
	go func() {
		defer close(k.done)
		_, k.err = l.runner.Do(ctx, name, func(context.Context, once.Run) error {
			close(started)
			<-k.unlocked
			return nil
		})
	}()
	select {
	case <-started:
		return k, nil
	case <-k.done:
		return nil, cmp.Or(k.err, ErrTaken)
	}
}

// Close waits for running jobs until ctx ends, and closes the connection. Shut down the
// scheduler first.
func (l *Locker) Close(ctx context.Context) error { return l.runner.Close(ctx) }

type lock struct {
	once     sync.Once
	unlocked chan struct{}
	done     chan struct{}
	err      error
}

// Unlock records that the job is over. Nobody runs it again for this time.
func (k *lock) Unlock(context.Context) error {
	k.once.Do(func() { close(k.unlocked) })
	<-k.done
	return k.err
}

// An Elector is a gocron.Elector: one of all Electors with the same key is the leader,
// until it is closed or its lock is lost, for example because its process died. Then the
// next Elector that is asked becomes the leader.
type Elector struct {
	locks *pgxlock.Locker
	key   string

	mu     sync.Mutex
	lock   *pgxlock.Lock
	closed bool
}

// NewElector returns an Elector whose leader holds the lock on key. When the leader has
// died, the others wait for the TTL if the Locker's locks are leases, and until the server
// notices if they are advisory locks.
//
// If the lock is lost, a job that the leader has begun goes on. A job that must not run
// twice at once needs a lock of its own.
func NewElector(locks *pgxlock.Locker, key string) (*Elector, error) {
	if locks == nil {
		return nil, errors.New("gocronlock: the Locker is nil; make one with pgxlock.NewLeaseLocker")
	}
	if key == "" {
		return nil, errors.New("gocronlock: the key is empty; name the leadership")
	}
	return &Elector{locks: locks, key: key}, nil
}

// IsLeader returns nil if this process is the leader or becomes it now, ErrNotLeader if
// another process is, and any other error if that is unknown.
func (e *Elector) IsLeader(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return pgxlock.ErrClosed
	}
	if e.lock != nil {
		if e.lock.Err() == nil {
			return nil
		}
		_ = e.lock.Release(ctx) // says once more that it is lost
		e.lock = nil
	}
	lock, err := e.locks.TryAcquire(ctx, e.key)
	if errors.Is(err, pgxlock.ErrNotAcquired) {
		return fmt.Errorf("%w: %w", ErrNotLeader, err)
	}
	if err != nil {
		return err
	}
	e.lock = lock
	return nil
}

// Close ends the leadership, so that another process gets it at once. The Locker stays
// open. Shut down the scheduler first.
func (e *Elector) Close(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	if e.lock == nil {
		return nil
	}
	return e.lock.Release(ctx)
}
