package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// An order is what the demonstration tells a worker, as a line of JSON.
type order struct {
	Do       string        `json:"do"`
	Key      string        `json:"key"`
	TTL      time.Duration `json:"ttl,omitempty"`
	Metadata string        `json:"metadata,omitempty"`
	Turns    int           `json:"turns,omitempty"`
}

// What a worker can be told.
const (
	doTurns         = "turns"          // go through a critical section, again and again
	doTake          = "take"           // wait for the lock and keep it
	doTry           = "try"            // take the lock if it is free
	doLook          = "look"           // ask the lock whether it is held
	doWrite         = "write"          // write under the lock, with Lock.Fence
	doWriteUnfenced = "write-unfenced" // write as if there were no Fence, and roll back
)

// A report is what a worker answers, as a line of JSON.
type report struct {
	Worker string        `json:"worker"`
	Did    string        `json:"did"` // an order's Do
	Token  int64         `json:"token,omitempty"`
	Holder string        `json:"holder,omitempty"`
	Waited time.Duration `json:"waited,omitempty"`
	Inside time.Duration `json:"inside,omitempty"`

	Err    string `json:"err,omitempty"`
	Lost   bool   `json:"lost,omitempty"`    // Err is pgxlock.ErrLost
	Busy   bool   `json:"busy,omitempty"`    // Err is pgxlock.ErrNotAcquired
	HeldBy string `json:"held_by,omitempty"` // with Busy
}

// A worker is one process of the demonstration, with a Locker of its own.
type worker struct {
	name  string
	pool  *pgxpool.Pool
	locks *pgxlock.Locker
	held  map[string]*pgxlock.Lock
	out   *json.Encoder
}

// work follows orders until there are no more, or until the demo's main process has gone. It
// releases nothing then: the database goes away as well.
func work(ctx context.Context, name, url string, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Owner: name})
	if err != nil {
		return err
	}
	w := &worker{name: name, pool: pool, locks: locks, held: make(map[string]*pgxlock.Lock), out: json.NewEncoder(out)}

	// Orders are read while one is followed, so that the end of them ends a wait.
	orders := make(chan order)
	go func() {
		defer close(orders)
		defer cancel()
		for decoder := json.NewDecoder(in); ; {
			var o order
			if decoder.Decode(&o) != nil {
				return
			}
			select {
			case orders <- o:
			case <-ctx.Done():
				return
			}
		}
	}()
	for o := range orders {
		if err := w.report(o.Do, w.follow(ctx, o)); err != nil {
			return err
		}
	}
	return nil
}

// report sends a report. Lines as short as ours arrive whole, though several
// processes share the pipe.
func (w *worker) report(did string, r report) error {
	r.Worker, r.Did = w.name, did
	return w.out.Encode(r)
}

func (w *worker) follow(ctx context.Context, o order) report {
	switch o.Do {
	case doTurns:
		return w.takeTurns(ctx, o)
	case doTake, doTry:
		return w.take(ctx, o)
	}
	lock := w.held[o.Key]
	if lock == nil {
		return failed(errors.New("there is no lock on " + o.Key))
	}
	switch o.Do {
	case doLook:
		return failed(lock.Err())
	case doWrite:
		return failed(pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
			if err := lock.Fence(ctx, tx); err != nil {
				return err
			}
			return w.write(ctx, tx, lock)
		}))
	case doWriteUnfenced:
		tx, err := w.pool.Begin(ctx)
		if err == nil {
			err = errors.Join(w.write(ctx, tx, lock), tx.Rollback(ctx))
		}
		return failed(err)
	}
	return failed(errors.New("unknown order " + o.Do))
}

func (w *worker) write(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
	_, err := tx.Exec(ctx, "INSERT INTO ledger (worker, token) VALUES ($1, $2)", w.name, lock.Token())
	return err
}

func (w *worker) take(ctx context.Context, o order) report {
	opts := []pgxlock.AcquireOption{pgxlock.TTL(o.TTL)}
	if o.Metadata != "" {
		opts = append(opts, pgxlock.Metadata(o.Metadata))
	}
	acquire := w.locks.Acquire
	if o.Do == doTry {
		acquire = w.locks.TryAcquire
	}
	asked := time.Now()
	lock, err := acquire(ctx, o.Key, opts...)
	if err != nil {
		return failed(err)
	}
	w.held[o.Key] = lock
	return report{Token: lock.Token(), Holder: lock.Holder(), Waited: time.Since(asked)}
}

// takeTurns goes through the critical section, and reports each turn while it is
// still inside, so that reports arrive in the order of the turns. The answer at
// the end has no token.
func (w *worker) takeTurns(ctx context.Context, o order) report {
	for range o.Turns {
		asked := time.Now()
		err := w.locks.Do(ctx, o.Key, func(ctx context.Context, lock *pgxlock.Lock) error {
			granted := time.Now()
			var inside int
			var entered time.Time
			if err := w.pool.QueryRow(ctx, enterSQL).Scan(&inside, &entered); err != nil {
				return err
			}
			time.Sleep(5*time.Millisecond + rand.N(20*time.Millisecond)) // the work
			if _, err := w.pool.Exec(ctx, leaveSQL, w.name, lock.Token(), inside, entered); err != nil {
				return err
			}
			return w.report(o.Do, report{Token: lock.Token(), Waited: granted.Sub(asked), Inside: time.Since(granted)})
		})
		if err != nil {
			return failed(err)
		}
		time.Sleep(50*time.Millisecond + rand.N(150*time.Millisecond)) // other work, without the lock
	}
	return report{}
}

const (
	// enterSQL enters the critical section: how many are in it now, with the caller?
	enterSQL = "UPDATE section SET inside = inside + 1 RETURNING inside, clock_timestamp()"

	// leaveSQL leaves it, and puts the turn on record.
	leaveSQL = `
		WITH gone AS (UPDATE section SET inside = inside - 1)
		INSERT INTO turns (worker, token, inside, entered_at, left_at) VALUES ($1, $2, $3, $4, clock_timestamp())`
)

// failed reports how an order ended.
func failed(err error) report {
	if err == nil {
		return report{}
	}
	r := report{Err: err.Error(), Lost: errors.Is(err, pgxlock.ErrLost), Busy: errors.Is(err, pgxlock.ErrNotAcquired)}
	if e, ok := errors.AsType[*pgxlock.Error](err); ok {
		r.HeldBy = e.Holder
	}
	return r
}
