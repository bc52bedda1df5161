package main

import (
	"context"
	"regexp"
	"slices"
	"testing"
	"time"
)

// matchAll matches each row.
var matchAll = regexp.MustCompile("")

func TestRowIsHeldForTheRatiosThatAreChosen(t *testing.T) {
	rows := rowsMatching(regexp.MustCompile(`^lease/(etcd|redsync) 32$`))
	if len(rows) != 1 {
		t.Fatalf("there are %d rows, not 1", len(rows))
	}
	if names := rows[0].names(); !slices.Equal(names, []string{"etcd", "lease", "redsync"}) {
		t.Errorf("the ways are %v", names)
	}
	if rows := rowsMatching(regexp.MustCompile(`^locktx/floor`)); len(rows) != 2 {
		t.Errorf("there are %d rows of locktx/floor, not 2", len(rows))
	}
}

func TestEveryRatioHasANameOfItsOwnAndWaysThatAreThere(t *testing.T) {
	seen := make(map[string]bool)
	for _, r := range rowsMatching(matchAll) {
		for _, of := range r.ratios {
			if name := r.name(of); seen[name] {
				t.Errorf("there are two %s", name)
			}
			seen[r.name(of)] = true
		}
	}
	for _, table := range tables {
		for _, c := range table.contestants {
			for _, a := range c.against {
				if !slices.ContainsFunc(table.contestants, func(c contestant) bool { return c.name == a.peer }) {
					t.Errorf("%s: %s/%s, but there is no %s", table.name, c.name, a.peer, a.peer)
				}
			}
		}
	}
}

func TestUnavailableRowsAreLeftOut(t *testing.T) {
	absent := &daemon{called: "such server", script: "no-such-tree", program: "there-is-no-such-program"}
	if err := absent.find(t.Context()); err != nil {
		t.Fatal(err)
	}
	if absent.missing == nil {
		t.Error("it does not say why")
	}
	nothing := func(context.Context, *stage) (op, error) { return nil, nil }
	several := table{contestants: []contestant{
		{name: "there", prepare: nothing},
		{name: "absent", needs: absent, prepare: nothing},
		{name: "not asked for", prepare: nothing},
	}}
	ways, err := several.prepare(t.Context(), newStage(nil, 1), []string{"there", "absent"})
	if err != nil {
		t.Fatal(err)
	}
	if len(ways) != 1 || ways[0].name != "there" {
		t.Errorf("the ways are %v", ways)
	}
	r := row{workers: 1, prepare: several.prepare, ratios: []ratio{{system: "there", peer: "absent"}}}
	if m, err := r.measure(t.Context(), nil, time.Minute); err != nil || len(m.found) > 0 {
		t.Error(m, err) // without a ratio there is nothing to measure
	}
}
