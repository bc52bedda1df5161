package pgxlockprom

import (
	"cmp"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgxlock/pgxlock/monitor"
)

// CollectorConfig configures [NewCollector]. A nil *CollectorConfig means the defaults.
type CollectorConfig struct {
	// Schema is where the migrations were run. Default: as in [monitor.Config].
	Schema string

	// Timeout bounds the reading of the database for one scrape. Default: 5 s.
	Timeout time.Duration

	// Every is the shortest time between two readings; scrapes that come earlier see the
	// last one. Each blocks the server's lock table for a moment. Default: 5 s.
	Every time.Duration

	// Doctor adds a metric of the checks of pgxlock doctor, which run every 5 minutes. It
	// opens connections of its own for them.
	Doctor bool
}

// NewCollector returns a collector that shows the locks of a database, of all programs that
// use it: holders, waiters, leases that expired, and the load of the server. One process
// should register it, not each one. A scrape takes one connection of the pool and sends
// read-only statements; it needs the rights of a [monitor.Monitor].
func NewCollector(pool *pgxpool.Pool, cfg *CollectorConfig) (prometheus.Collector, error) {
	var c CollectorConfig
	if cfg != nil {
		c = *cfg
	}
	locks, err := monitor.New(pool, &monitor.Config{Schema: c.Schema})
	if err != nil {
		return nil, err
	}
	if c.Timeout < 0 || c.Every < 0 {
		return nil, errors.New("pgxlock: a duration of the metrics is negative; leave it 0 for the default")
	}
	c.Timeout, c.Every = cmp.Or(c.Timeout, defaultTimeout), cmp.Or(c.Every, defaultEvery)
	return &collector{pool: pool, locks: locks, cfg: c}, nil
}
