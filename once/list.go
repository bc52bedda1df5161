package once

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/sql"
)

// State is the state of a recorded run.
type State string

// The states of a run.
const (
	// StateRunning: the run was started and has not ended. Of a run without Retry this
	// may also mean that its process has died: nobody can tell.
	StateRunning State = "running"

	StateSucceeded State = "succeeded"
	StateFailed    State = "failed"

	// StateAbandoned: a run with Retry whose lease has expired, because its process has
	// died or cannot reach the server. The next call in its period starts it again.
	StateAbandoned State = "abandoned"

	// StateSkipped: the period was under way when the key was new, see [Config].First.
	StateSkipped State = "skipped"
)

// A Schedule says when the periods of a key begin. The zero value stands for the ticks of
// [Runner.DoAt].
type Schedule struct {
	Period   time.Duration
	Offset   time.Duration
	Location string // the name of the time zone
}

// String returns a text such as "24h0m0s, offset 3h0m0s, Europe/Berlin".
func (s Schedule) String() string {
	if s.Period == 0 {
		return "ticks"
	}
	return fmt.Sprintf("%s, offset %s, %s", s.Period, s.Offset, s.Location)
}

// A Record is what is recorded of a run.
type Record struct {
	Key      string
	Slot     time.Time // the beginning of the period, or the tick
	State    State
	Attempts int    // how often it was started; 0: it was skipped
	Holder   string // the Owner of the Runner that started it last, and an id of the attempt
	Retry    bool   // its process may start it again if it fails or dies
	Schedule Schedule
	Started  time.Time // when the last attempt began; zero: it was skipped
	Finished time.Time // zero: it has not
	Error    string    // of a failed run
}

// ListConfig configures [List]. A nil *ListConfig means the defaults.
type ListConfig struct {
	// Key is the key whose runs are listed. Default: all keys.
	Key string

	// Limit is how many runs are listed at most, from 1 to 10000. Default: 100.
	Limit int

	// Schema is where the migrations were run, as in [Config].
	Schema string
}

// List returns the recorded runs, those of the latest periods and ticks first. It makes a
// connection with the pool's configuration, and closes it. The role needs the rights of an
// application, of monitoring or of administration. The error is an [*pgxlock.Error].
func List(ctx context.Context, pool *pgxpool.Pool, cfg *ListConfig) ([]Record, error) {
	var c ListConfig
	if cfg != nil {
		c = *cfg
	}
	records, err := list(ctx, pool, c)
	return records, fail("list runs", c.Key, err)
}

const maxListed = 10000

func list(ctx context.Context, pool *pgxpool.Pool, cfg ListConfig) (records []Record, err error) {
	if err := lockerr.MissingContext(ctx); err != nil {
		return nil, err
	}
	if pool == nil {
		return nil, errors.New("the pool is nil; make one with pgxpool.New")
	}
	var key *string
	if cfg.Key != "" {
		if err := lockkey.Check(cfg.Key); err != nil {
			return nil, err
		}
		key = &cfg.Key
	}
	if cfg.Limit == 0 {
		cfg.Limit = 100
	}
	if cfg.Limit < 0 || cfg.Limit > maxListed {
		return nil, fmt.Errorf("once.ListConfig.Limit is %d, it must be between 1 and %d", cfg.Limit, maxListed)
	}
	if err := place.CheckName(cfg.Schema); err != nil {
		return nil, fmt.Errorf("once.ListConfig.Schema %.80q %w", cfg.Schema, err)
	}
	t := newTable(pool.Config(), Config{Schema: cfg.Schema}, slots{})
	t.place.Config = "once.ListConfig"
	defer t.close()
	err = t.session.Do(ctx, dbconn.Timeout, func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		records, err = pgx.CollectRows(q.Query(ctx, t.place.Statement(statements.OnceList), key, cfg.Limit), func(row pgx.CollectableRow) (r Record, err error) {
			var period, offset float64
			var finished *time.Time
			err = row.Scan(&r.Key, &r.Slot, &r.State, &r.Attempts, &r.Holder, &r.Retry, &r.Started, &finished, &r.Error, &period, &offset, &r.Schedule.Location)
			if r.State == StateSkipped {
				r.Started = time.Time{} // not when that was decided
			}
			r.Schedule.Period, r.Schedule.Offset = ofSeconds(period), ofSeconds(offset)
			if finished != nil {
				r.Finished = *finished
			}
			return r, err
		})
		return err
	})
	return records, err
}
