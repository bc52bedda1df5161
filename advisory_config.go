package pgxlock

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
)

// AdvisoryConfig configures a Locker of [NewAdvisoryLocker]. A nil *AdvisoryConfig means
// the defaults.
type AdvisoryConfig struct {
	// TTL bounds how long the server keeps the locks of a process that it receives nothing
	// from, because the network is gone or the process is frozen. The server ends the
	// session when TTL is over (idle_session_timeout). The Locker counts its locks as lost
	// a tenth of TTL earlier, but at least 100 ms. It pings after each third of TTL in
	// which it sent nothing else. At least 1 s, at most 24 days; default 30 s. Negative: no
	// bound, so the server keeps the locks until TCP gives up the connection, which can
	// take hours.
	TTL time.Duration

	// MaxLocks is how many keys this Locker may hold at once; the next one fails with
	// [ErrMaxLocks]. Each key takes an entry in the lock table that all sessions of the
	// server share and that no session can work without. Default: a tenth of the entries
	// that the lock table is sure to have, at most 2048.
	MaxLocks int

	// Tokens gives each lock a fencing token, [Lock.Token], from the same sequence as
	// leases, and lets transactions fence with [Lock.Fence]. Each acquisition then waits
	// for a commit, which concurrent acquisitions share, and needs the migrations
	// ([ErrSchema]). Callers of one Locker that share a lock share its token. Readers in
	// several processes have different tokens, each greater than those of the writers
	// before them and less than those of the writers after them: a resource compares a
	// reader's token only with writers' tokens. Only locks taken with Tokens are fenced
	// against each other: pg_advisory_lock, LockTx and Lockers without Tokens exclude them,
	// but do not wait for fenced transactions.
	Tokens bool

	// Schema is where the migrations were run, for Tokens and for the queue in which
	// processes wait. Without the migrations, waiters poll. Default: the schema in which
	// the search_path of a new connection finds acquire_lock, otherwise the only one in the
	// database that has pgxlock, if there is one.
	Schema string

	// SessionPooler declares that the pooler between the program and the server is in
	// session mode, which the Locker cannot detect for certain. If the pooler turns out to
	// share its server connections, it is refused with [ErrPooler], and all locks are lost.
	SessionPooler bool

	// Owner is shown to operators in application_name, unless the pool's configuration sets
	// one, and begins each [Lock.Holder]. Up to 200 characters, not beginning with "*".
	// Default host:pid.
	Owner string

	// Backoff is how long to wait before the next try for a key whose holder does not
	// notify waiters: a holder that is no Locker, or a Locker without the queue of waiters.
	// attempt counts the tries of one wait from 0. It is also the pause before connecting
	// again, up to 1 s. Many goroutines may call it. Default: [ExponentialBackoff] from 10
	// ms to 500 ms.
	Backoff func(attempt int) time.Duration

	// Logger receives what no call can return. Default: nothing is logged.
	Logger *slog.Logger

	// Observe receives an [Event] for every step of calls and locks, to build metrics and
	// traces from. See Event for when and in which goroutine it is called, and what it must
	// not do. Default: nil, which costs nothing.
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
