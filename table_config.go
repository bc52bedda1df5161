package pgxlock

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
)

// LeaseConfig is the policy of a Lease Locker. A nil *LeaseConfig means the
// defaults.
type LeaseConfig struct {
	// TTL is how long a lease lasts from its grant and from each renewal: how
	// long others wait when this process has died. At least 1 s; default 30 s.
	// The option [TTL] changes it for one lock.
	TTL time.Duration

	// Renew is how often leases with that TTL are renewed: at most, and by
	// default, a third of it. Those with a TTL of their own are renewed after a
	// third of that.
	Renew time.Duration

	// Margin is how much earlier than the server we stop believing in a lease:
	// what the clocks of both may drift apart within one TTL. At least, and by
	// default, a tenth of TTL, but not less than 100 ms; at most a third of TTL.
	// A lock with a TTL of its own has a margin in proportion.
	Margin time.Duration

	// OneConnection sends requests and renewals over one connection instead of two: for a
	// program that holds one lock at a time, of which there are many, such as a command.
	// While the server works on a request of this Locker, no renewal is sent; a request
	// gives up after half the least TTL that is held, so that the renewal still has time.
	// Default: renewals have a connection of their own.
	OneConnection bool

	// Owner is shown to operators as the holder, with an id of each acquisition
	// behind it. Up to 200 characters, not beginning with "*". Default host:pid.
	Owner string

	// Schema is where the migrations were run. Default: the schema in which
	// acquire_lock is found by the search_path of a new connection, else the only
	// one in the database that has pgxlock.
	Schema string

	// Backoff is how long to wait before asking again where nobody tells when to:
	// the server is away, or notifications do not arrive, as behind a pooler; in the
	// attempt-th try of one wait, counted from 0. It may be called by many
	// goroutines. Default: [ExponentialBackoff] from 10 ms to 500 ms. The wait is never
	// longer than the holder's lease lasts.
	Backoff func(attempt int) time.Duration

	// Logger gets what no caller is told: renewals that failed, releases that did
	// not get through. Default: nothing is logged.
	Logger *slog.Logger

	// Observe is told what becomes of each call and each lock, for metrics and traces:
	// see [Event] for what, when, in which goroutine, and what it must not do. Default: nil,
	// which costs nothing.
	Observe func(context.Context, Event)
}

// minRenew keeps a forgotten unit from becoming a storm of renewals.
const minRenew = 100 * time.Millisecond

// withDefaults checks a configuration and fills in what was left out.
func (c *LeaseConfig) withDefaults() (LeaseConfig, error) {
	var cfg LeaseConfig
	if c != nil {
		cfg = *c
	}
	if cfg.TTL == 0 {
		cfg.TTL = 30 * time.Second
	}
	if err := checkTTL("LeaseConfig.TTL", cfg.TTL); err != nil {
		return cfg, err
	}
	if cfg.Renew == 0 {
		cfg.Renew = cfg.TTL / 3
	}
	if cfg.Renew < minRenew || cfg.Renew > cfg.TTL/3 {
		return cfg, fmt.Errorf("LeaseConfig.Renew is %s, it must be between %s and a third of the TTL, %s", cfg.Renew, minRenew, (cfg.TTL / 3).Truncate(time.Millisecond))
	}
	if err := place.CheckName(cfg.Schema); err != nil {
		return cfg, fmt.Errorf("LeaseConfig.Schema %.80q %w", cfg.Schema, err)
	}
	least := max(cfg.TTL/10, 100*time.Millisecond)
	if cfg.Margin == 0 {
		cfg.Margin = least
	}
	if cfg.Margin < least || cfg.Margin > cfg.TTL/3 {
		return cfg, fmt.Errorf("LeaseConfig.Margin is %s, it must be between %s and a third of the TTL, %s", cfg.Margin, least, (cfg.TTL / 3).Truncate(time.Millisecond))
	}
	var err error
	if cfg.Owner, err = lockkey.Owner("LeaseConfig", cfg.Owner); err != nil {
		return cfg, err
	}
	cfg.Backoff, cfg.Logger = orDefaults(cfg.Backoff, cfg.Logger)
	return cfg, nil
}

// orDefaults fills in what every kind of Locker has.
func orDefaults(backoff func(int) time.Duration, log *slog.Logger) (func(int) time.Duration, *slog.Logger) {
	if backoff == nil {
		backoff = defaultBackoff
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return backoff, log
}
