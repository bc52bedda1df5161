package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lease"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/internal/waitqueue"
)

// NewLeaseLocker returns a Locker whose locks are leases. They need the migrations
// ([ErrSchema]), and work with SQL callers of acquire_lock.
//
// The Locker opens two connections: one for requests and one for renewals; with
// [LeaseConfig.OneConnection] one for both. While a call waits for another process, or leads,
// it has one more, which listens, and is closed when no call has needed it for the pool's
// MaxConnIdleTime.
//
// A program on database/sql makes the pool beside its *sql.DB, from the same connection string
// without settings that only lib/pq knows, such as binary_parameters.
func NewLeaseLocker(pool *pgxpool.Pool, cfg *LeaseConfig) (*Locker, error) {
	return newLease(pool, cfg, clock.System)
}

func newLease(pool *pgxpool.Pool, config *LeaseConfig, now clock.Clock) (*Locker, error) {
	cfg, err := config.withDefaults()
	if err == nil && pool == nil {
		err = errors.New("the pool is nil; make one with pgxpool.New")
	}
	if err != nil {
		return nil, &Error{Op: "new", Kind: KindLease, Err: err}
	}
	l := newLocker(KindLease, now, cfg.Backoff, cfg.Logger)
	l.observe, l.ttl = cfg.Observe, cfg.TTL
	t := lease.New(pool.Config(), lease.Config{Owner: cfg.Owner, Schema: cfg.Schema, TTL: cfg.TTL, Renew: cfg.Renew, Margin: cfg.Margin, OneConnection: cfg.OneConnection, Async: cfg.Durability == Async})
	l.connect(waitqueue.Server{Owner: cfg.Owner, Place: t.Installation(), Runner: t, Dialer: t.Dialer()})
	l.use(t)
	t.Use(l.host())
	return l, nil
}

// LeaseConfig configures a Locker of [NewLeaseLocker]. A nil *LeaseConfig means the
// defaults.
type LeaseConfig struct {
	// TTL is how long a lease lasts from its grant and from each renewal: how long others
	// wait after this process has died. At least 1 s; default 30 s. The option [TTL]
	// changes it for one lock.
	TTL time.Duration

	// Renew is the interval between renewals of leases with that TTL: at most, and by
	// default, a third of it. A lease with its own TTL is renewed after a third of that.
	Renew time.Duration

	// Margin is how much earlier than on the server a lease expires locally: how far the two
	// clocks may drift apart within one TTL. At least, and by default, a tenth of TTL, but not
	// less than 100 ms; at most a third. With the option TTL in proportion.
	Margin time.Duration

	// OneConnection sends requests and renewals over one connection instead of two, for
	// programs that hold one lock at a time and run in many copies, such as a command. While
	// the server works on a request, no renewal is sent; so a request gives up after 5 s, or
	// after half of the shortest TTL that is held if that is less.
	OneConnection bool

	// Durability says whether acquires and releases wait until the server's disk has them.
	// Default: Durable. See [Async] for what that gives up.
	Durability Durability

	// Owner is the beginning of the holder id that operators see; an id of the acquisition
	// follows it. Up to 200 characters, not beginning with "*". Default host:pid.
	Owner string

	// Schema is where the migrations were run. To name it is to trust its owner, whose
	// functions then run with the rights of this program. Default: the first schema of a new
	// connection's search_path that has pgxlock, otherwise the only one in the database; there
	// all of pgxlock must belong to superusers or to the owner of the database.
	Schema string

	// Backoff is how long to wait before the next try if no notification says when to try:
	// while the server cannot be reached, or behind a pooler. attempt counts the tries of one
	// wait from 0. Many goroutines may call it. The pause is never longer than the rest of the
	// holder's lease. Default: [ExponentialBackoff] from 10 ms to 500 ms.
	Backoff func(attempt int) time.Duration

	// Logger receives what no call can return: failed renewals, releases that did not reach
	// the server. Default: nothing is logged.
	Logger *slog.Logger

	// Observe receives an [Event] for every step of calls and locks. Default: nil, at no cost.
	Observe func(context.Context, Event)
}

// Durability says what a crash of the server may take back.
type Durability int

const (
	// Durable leases survive a crash of the server, and released ones stay released.
	Durable Durability = iota

	// Async acquires and releases return before the server's disk has them, with
	// synchronous_commit = off. Renewals wait for the disk. A crash of the server, or a
	// failover, may then take back what it wrote in the last moments (up to three times
	// wal_writer_delay, as a rule 0.6 s). A lease that was not renewed yet may be gone, and
	// another caller may get it while its holder still believes that it holds it: until the
	// Locker has connected again and renewed all its leases, which it does at once, or at the
	// latest until the lease expires. A released lease may be held again until it expires.
	//
	// Everything else holds: tokens grow, and none is given out twice; [Lock.Fence], and a
	// resource that compares tokens, refuse a holder whose lease is gone. Lockers with either
	// durability, and SQL callers, use the same leases.
	Async
)

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
	var err error
	if cfg.Renew, err = lease.RenewInterval(cfg.Renew, cfg.TTL); err != nil {
		return cfg, fmt.Errorf("LeaseConfig.Renew %w", err)
	}
	if cfg.Durability != Durable && cfg.Durability != Async {
		return cfg, fmt.Errorf("LeaseConfig.Durability is %d, it must be Durable or Async", cfg.Durability)
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
	if cfg.Owner, err = lockkey.Owner("LeaseConfig", cfg.Owner); err != nil {
		return cfg, err
	}
	cfg.Backoff, cfg.Logger = orDefaults(cfg.Backoff, cfg.Logger)
	return cfg, nil
}

// orDefaults fills in what every kind of Locker has.
func orDefaults(backoff func(int) time.Duration, log *slog.Logger) (func(int) time.Duration, *slog.Logger) {
	if backoff == nil {
		backoff = clock.DefaultBackoff
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return backoff, log
}
