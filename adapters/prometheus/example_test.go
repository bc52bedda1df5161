package pgxlockprom_test

import (
	"log"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/pgxlock/pgxlock"
	pgxlockprom "github.com/pgxlock/pgxlock/adapters/prometheus"
)

// Examples without output are compiled and shown, not run: they need a server.
var pool *pgxpool.Pool

// Each process counts what its own locks do. The keys of invoice:1 to invoice:1000000 are
// one group.
func ExampleNew() {
	metrics, err := pgxlockprom.New(prometheus.DefaultRegisterer, &pgxlockprom.Config{
		Group: func(key string) string {
			group, _, _ := strings.Cut(key, ":")
			return group
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Observe: metrics.Observe})
	if err != nil {
		log.Fatal(err)
	}
	_ = locks
	http.Handle("/metrics", promhttp.Handler())
}

// One process shows the locks of the database, of all programs.
func ExampleNewCollector() {
	collector, err := pgxlockprom.NewCollector(pool, &pgxlockprom.CollectorConfig{Doctor: true})
	if err != nil {
		log.Fatal(err)
	}
	prometheus.MustRegister(collector)
}
