package pgxlockprom_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

const alerts = "../../deploy/prometheus/alerts.yml"

// queries are the queries of the dashboard's panels.
func queries(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("../../deploy/grafana/pgxlock.json")
	check(t, err)
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	check(t, json.Unmarshal(text, &dashboard))
	var all []string
	for _, panel := range dashboard.Panels {
		if len(panel.Targets) == 0 {
			t.Errorf("the panel %q has no query", panel.Title)
		}
		for _, target := range panel.Targets {
			all = append(all, target.Expr)
		}
	}
	if len(all) < 10 {
		t.Fatalf("%d queries", len(all))
	}
	return all
}

var named = regexp.MustCompile(`pgxlock_[a-z_]+`)

func TestDashboardAndAlertsNameMetricsOfAScrape(t *testing.T) {
	t.Parallel()
	got := everything(t)
	rules, err := os.ReadFile(alerts)
	check(t, err)
	texts := queries(t)
	for line := range strings.Lines(string(rules)) {
		if expr, ok := strings.CutPrefix(strings.TrimSpace(line), "expr: "); ok {
			texts = append(texts, expr)
		}
	}
	for _, text := range texts {
		names := named.FindAllString(text, -1)
		if len(names) == 0 {
			t.Errorf("%s names no metric", text)
		}
		for _, name := range names {
			if _, seen := got.families[strings.TrimSuffix(name, "_bucket")]; !seen {
				t.Errorf("%s: no scrape shows %s", text, name)
			}
		}
	}
}

func TestPromtoolAcceptsQueriesAndSeesEachAlertFire(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	promtool := os.Getenv("PGXLOCK_TEST_PROMTOOL")
	if promtool == "" {
		pgtest.Missing(t, "promtool", "PGXLOCK_TEST_PROMTOOL does not name it: scripts/promtool-tree has it")
	}
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	for i, query := range queries(t) {
		fmt.Fprintf(&rules, "  - record: dashboard:query_%d\n    expr: %q\n", i, query)
	}
	panels := filepath.Join(t.TempDir(), "panels.yml")
	check(t, os.WriteFile(panels, []byte(rules.String()), 0o600))
	for _, args := range [][]string{{"check", "rules", alerts}, {"check", "rules", panels}, {"test", "rules", "testdata/alerts_test.yml"}} {
		if out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}
}
