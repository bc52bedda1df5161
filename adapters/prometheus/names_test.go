package pgxlockprom_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	pgxlockprom "github.com/pgxlock/pgxlock/adapters/prometheus"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// everything is a scrape in which each metric is seen. All tests share it.
func everything(t *testing.T) scrape {
	t.Helper()
	scraped.once.Do(func() { scraped.all = scrapeAll(t) })
	if scraped.all.families == nil {
		t.Fatal("another test says why there is no scrape")
	}
	return scraped.all
}

var scraped struct {
	once sync.Once
	all  scrape
}

func scrapeAll(t *testing.T) scrape {
	t.Helper()
	pool, registry := testkit.Migrated(t).Pool, prometheus.NewPedanticRegistry()
	m, err := pgxlockprom.New(registry, &pgxlockprom.Config{Group: family})
	check(t, err)
	collector, err := pgxlockprom.NewCollector(pool, &pgxlockprom.CollectorConfig{Doctor: true, Timeout: pgtest.Patience})
	check(t, err)
	check(t, registry.Register(collector))
	operate(t, pool, m)
	return read(t, registry)
}

var documented = regexp.MustCompile("(?m)^\\| `(pgxlock_[a-z_]+)` \\| (\\w+) \\| ([a-z, ]*) ?\\|")

func TestDocumentedMetricsAreThoseOfAScrape(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/metrics.md")
	check(t, err)
	got := everything(t)
	var names []string
	for _, line := range documented.FindAllStringSubmatch(string(page), -1) {
		name, kind := line[1], line[2]
		names = append(names, name)
		family, seen := got.families[name]
		if !seen {
			t.Errorf("docs/metrics.md has %s, which no scrape shows", name)
			continue
		}
		if is := strings.ToLower(family.GetType().String()); is != kind {
			t.Errorf("docs/metrics.md says that %s is a %s, it is a %s", name, kind, is)
		}
		var labels []string
		for _, pair := range family.Metric[0].Label {
			labels = append(labels, pair.GetName())
		}
		slices.Sort(labels)
		said := strings.FieldsFunc(line[3], func(r rune) bool { return r == ',' || r == ' ' })
		slices.Sort(said)
		if !slices.Equal(labels, said) {
			t.Errorf("docs/metrics.md says that %s has the labels %v, they are %v", name, said, labels)
		}
	}
	for name := range got.families {
		if !slices.Contains(names, name) {
			t.Errorf("docs/metrics.md lacks %s", name)
		}
	}
}
