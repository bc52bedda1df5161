package once

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
)

// Config is the policy of a [Runner]. A nil *Config means the defaults. Programs that use the
// same key must use the same period, Offset and Location. If a program finds a run of its
// period that was started with others, it logs a warning, once for each key.
//
// Offset and Location of a key may change from one release to the next. The period that was
// run under its former beginning is not run again: a period is not run if one was run that
// begins less than half a period earlier, or later. So the next run comes between half a
// period and one and a half after the last. Programs with different Offsets that ask in the
// same moment may both run. A period of another length is another period.
type Config struct {
	// Offset shifts the beginning of the periods: 3 h for a job that is due at 3 in the
	// morning. It is at least 0 and less than the period, in whole microseconds.
	// Default: 0.
	Offset time.Duration

	// Location is the time zone in which a period of whole days begins. Such a period
	// is an hour shorter or longer when the clocks change. If the clocks skip the
	// beginning, the period begins an hour later; if they show it twice, it begins the
	// second time. PostgreSQL reads such times in the same way:
	// https://www.postgresql.org/docs/current/datetime-invalid-input.html.
	// Use time.LoadLocation: the server does not know the name of time.Local. Default:
	// UTC, the only one for periods that are not whole days.
	Location *time.Location

	// First is what happens in the period that is under way when a key is asked for and no
	// run of it is recorded: FirstNow runs the job, FirstNext begins with the next period.
	// Default: FirstNext for [Runner.Run], which chooses the moment itself: a job that is
	// due at 3 in the morning does not run when it is deployed at 18:55. FirstNow for
	// [Runner.Do], whose caller has chosen the moment. A period that FirstNext has skipped
	// runs if a call with FirstNow asks for it. A key is also new again when its last run
	// is no longer remembered, see Keep. [Runner.DoAt] ignores First.
	First First

	// Retry allows a run that failed, or whose process died, to be started again within
	// its period. Such a run holds a lease while it runs, which operators see in
	// lock_leases as run:key@slot, and the Runner has one more connection. Default: a
	// run is started at most once.
	Retry bool

	// TTL is for how long the lease of a run with Retry lasts if it is not renewed: after
	// a crash the run can be started again when it has expired. It is also about how long
	// [Runner.Run] waits before it tries a failed run again. At least 1 s. Default: 30 s.
	// Without Retry there is no lease, and a TTL is refused.
	TTL time.Duration

	// CatchUp is how many of the last periods [Runner.Run] runs late if they were missed,
	// oldest first, before the current one. It never runs periods from before the first
	// recorded run of the key. With Retry a period whose run did not succeed counts as
	// missed. At most 1000. Default: 0, missed periods are skipped.
	CatchUp int

	// Keep is for how long runs are remembered: [Runner.DoAt] refuses older ticks. Starts
	// remove older rows, a few at a time. At least CatchUp+2 periods. Default: 7 days, or
	// CatchUp+3 periods if that is longer. If programs that use the same key have
	// different values, the shortest counts: do not ask any of them for older ticks.
	Keep time.Duration

	// Owner, Schema and Backoff are as in [pgxlock.LeaseConfig]: Owner names the process to
	// operators, Schema is where the migrations were run, and Backoff is how long Run
	// waits before it asks again if the server cannot be reached.
	Owner   string
	Schema  string
	Backoff func(attempt int) time.Duration

	// Logger receives what no caller receives: errors of fn in Run, a server that cannot
	// be reached, ends of runs that were not recorded. Default: nothing is logged.
	Logger *slog.Logger

	// Observe receives a [pgxlock.Event] with EventRun for each run that Do, DoAt or Run
	// asks for, and one with EventRunEnded for each run that they started. See Event for
	// when, and for what it may do. Default: nobody receives them.
	Observe func(context.Context, pgxlock.Event)
}

// First says what a key begins with, see [Config].
type First string

// The values of Config.First.
const (
	FirstNow  First = "now"  // with the period that is under way
	FirstNext First = "next" // with the next period
)

const (
	day        = 24 * time.Hour
	maxPeriod  = 3650 * day
	maxCatchUp = 1000
	minTTL     = time.Second     // as that of a lease
	maxTime    = 100 * 360 * day // PostgreSQL counts 360 days to a year
)

// backoff is the default of Config.Backoff, and the pause between attempts to record a run.
var backoff = pgxlock.ExponentialBackoff(10*time.Millisecond, 500*time.Millisecond)

func (c *Config) withDefaults(period time.Duration) (Config, error) {
	var cfg Config
	if c != nil {
		cfg = *c
	}
	if period < time.Millisecond || period > maxPeriod || period%time.Microsecond != 0 {
		return cfg, fmt.Errorf("period is %s, it must be between 1 ms and 3650 days, in whole microseconds", period)
	}
	if cfg.Offset < 0 || cfg.Offset >= period || cfg.Offset%time.Microsecond != 0 {
		return cfg, fmt.Errorf("once.Config.Offset is %s, it must be at least 0 and less than the period, %s, in whole microseconds", cfg.Offset, period)
	}
	if cfg.Location == nil {
		cfg.Location = time.UTC
	}
	if err := checkLocation(cfg.Location, period); err != nil {
		return cfg, err
	}
	if cfg.First != "" && cfg.First != FirstNow && cfg.First != FirstNext {
		return cfg, fmt.Errorf("once.Config.First is %.80q; use once.FirstNow or once.FirstNext", cfg.First)
	}
	if cfg.TTL != 0 && !cfg.Retry {
		return cfg, fmt.Errorf("once.Config.TTL is %s, but without Retry there is no lease; set Retry, or leave TTL out", cfg.TTL)
	}
	if cfg.TTL == 0 {
		cfg.TTL = 30 * time.Second
	}
	if cfg.TTL < minTTL || cfg.TTL > maxTime {
		return cfg, fmt.Errorf("once.Config.TTL is %s, it must be between %s and 100 years", cfg.TTL, minTTL)
	}
	if cfg.CatchUp < 0 || cfg.CatchUp > maxCatchUp {
		return cfg, fmt.Errorf("once.Config.CatchUp is %d, it must be between 0 and %d", cfg.CatchUp, maxCatchUp)
	}
	if period > maxTime/time.Duration(cfg.CatchUp+3) {
		return cfg, fmt.Errorf("once.Config.CatchUp is %d, but so many periods of %s are longer than runs can be kept, 100 years", cfg.CatchUp, period)
	}
	if cfg.Keep == 0 {
		cfg.Keep = max(7*day, time.Duration(cfg.CatchUp+3)*period)
	}
	if least := time.Duration(cfg.CatchUp+2) * period; cfg.Keep < least || cfg.Keep > maxTime {
		return cfg, fmt.Errorf("once.Config.Keep is %s, it must be between CatchUp+2 periods, %s, and 100 years", cfg.Keep, least)
	}
	if err := place.CheckName(cfg.Schema); err != nil {
		return cfg, fmt.Errorf("once.Config.Schema %.80q %w", cfg.Schema, err)
	}
	var err error
	if cfg.Owner, err = lockkey.Owner("once.Config", cfg.Owner); err != nil {
		return cfg, err
	}
	if cfg.Backoff == nil {
		cfg.Backoff = backoff
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return cfg, nil
}

// checkLocation makes sure that the server knows the time zone by the same name.
func checkLocation(location *time.Location, period time.Duration) error {
	if location == time.UTC {
		return nil
	}
	if period%day != 0 {
		return fmt.Errorf("once.Config.Location is %s, but the period, %s, is not a number of whole days; leave it out, and shift the period by Offset", location, period)
	}
	name := location.String()
	known, err := time.LoadLocation(name)
	if err != nil || name == "" || name == "Local" || !sameClocks(location, known) {
		return fmt.Errorf("once.Config.Location %.80q is no name of the IANA time zone database; use time.LoadLocation(\"Europe/Berlin\"), for example", name)
	}
	return nil
}

// sameClocks tells a time.FixedZone from the time zone that has the same name.
func sameClocks(a, b *time.Location) bool {
	now := time.Now()
	for month := range 12 {
		t := now.AddDate(0, month, 0)
		_, one := t.In(a).Zone()
		_, other := t.In(b).Zone()
		if one != other {
			return false
		}
	}
	return true
}
