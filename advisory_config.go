package pgxlock

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
)

// AdvisoryConfig is the policy of an Advisory Locker. A nil *AdvisoryConfig means
// the defaults.
type AdvisoryConfig struct {
	// TTL bounds how long the server keeps the locks of a process that it does not
	// hear of, because the network is gone or the process is frozen: it ends the
	// session then (idle_session_timeout), and we stop believing in the locks
	// before, by a tenth of TTL, but not less than 100 ms. The Locker pings each
	// third of TTL in which nothing else was sent. At least 1 s, at most 24 days;
	// default 30 s. Negative: no bound, so that the server keeps the locks until
	// TCP gives the connection up, which can take hours.
	TTL time.Duration

	// MaxLocks is how many keys may be locked at once; one more is refused with
	// [ErrMaxLocks]. Each takes a place in the lock table that all sessions of the
	// server share, and without which none can work. Default: a tenth of what that
	// table has room for at least, but not more than 2048.
	MaxLocks int

	// Tokens makes each lock draw a fencing token, [Lock.Token], from the sequence that
	// leases have, and lets transactions fence with [Lock.Fence]. An acquisition then
	// waits for a commit, once for all that are asked together, and needs the
	// migrations ([ErrSchema]). Callers of one Locker who share a lock share its token.
	// Readers in several processes have different tokens, each greater than those of the
	// writers before them and less than those of the writers after them: a resource
	// compares a reader's token with writers' tokens only. Only locks that are taken with Tokens are
	// fenced against each other: pg_advisory_lock, LockTx and Lockers without
	// Tokens exclude them, but do not wait for transactions that have fenced.
	Tokens bool

	// Schema is where the migrations were run, for Tokens and for the queue in which
	// processes wait. Without them who waits asks now and then.
	// Default: the schema in which acquire_lock is found by the search_path of a new
	// connection, else the only one in the database that has pgxlock, if there is one.
	Schema string

	// SessionPooler says that a pooler between us and the server is in session
	// mode, which we cannot know for certain: one that turns out to share its
	// connections is refused with [ErrPooler], and all locks are lost then.
	SessionPooler bool

	// Owner is shown to operators, in application_name, unless the pool's
	// configuration has one, and begins each [Lock.Holder]. Up to 200 characters, not
	// beginning with "*". Default host:pid.
	Owner string

	// Backoff is how long to wait before asking again for a key that somebody has who
	// does not tell when it is free: no Locker, or one without the queue of waiters;
	// in the attempt-th try of one wait, counted from 0. Also, up to 1 s, before
	// connecting again. It may be called by many goroutines. Default:
	// [ExponentialBackoff] from 10 ms to 500 ms.
	Backoff func(attempt int) time.Duration

	// Logger gets what no caller is told. Default: nothing is logged.
	Logger *slog.Logger

	// Observe is told what becomes of each call and each lock, for metrics and traces:
	// see [Event] for what, when, in which goroutine, and what it must not do. Default: nil,
	// which costs nothing.
	Observe func(context.Context, Event)
}

// maxAdvisoryLocks is the default for MaxLocks on a large server.
const maxAdvisoryLocks = 2048

// maxAdvisoryTTL is what idle_session_timeout can express, in whole days.
const maxAdvisoryTTL = 24 * 24 * time.Hour

// withDefaults checks a configuration and fills in what was left out.
func (c *AdvisoryConfig) withDefaults() (AdvisoryConfig, error) {
	var cfg AdvisoryConfig
	if c != nil {
		cfg = *c
	}
	if cfg.TTL == 0 {
		cfg.TTL = 30 * time.Second
	}
	if cfg.TTL > 0 && cfg.TTL < minTTL || cfg.TTL > maxAdvisoryTTL {
		return cfg, fmt.Errorf("AdvisoryConfig.TTL is %s, it must be between %s and 24 days, or negative for none", cfg.TTL, minTTL)
	}
	if cfg.MaxLocks < 0 {
		return cfg, fmt.Errorf("AdvisoryConfig.MaxLocks is %d, it must be 1 or more, or 0 for the default", cfg.MaxLocks)
	}
	if err := place.CheckName(cfg.Schema); err != nil {
		return cfg, fmt.Errorf("AdvisoryConfig.Schema %.80q %w", cfg.Schema, err)
	}
	var err error
	if cfg.Owner, err = lockkey.Owner("AdvisoryConfig", cfg.Owner); err != nil {
		return cfg, err
	}
	cfg.Backoff, cfg.Logger = orDefaults(cfg.Backoff, cfg.Logger)
	return cfg, nil
}
