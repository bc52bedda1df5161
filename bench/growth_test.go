package main

import (
	"context"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// TestMain lets the tests' program be the children that growth starts.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "-child" {
		if err := runChild(context.Background(), os.Args[2], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	if testing.Short() { // bench is no part of what ships
		fmt.Println("make test-all runs bench's tests")
		return
	}
	os.Exit(m.Run())
}

func TestGrowthMeasuresEachSizeAndWritesItsPageAndCharts(t *testing.T) {
	var g growth
	err := withServer(t.Context(), pgserver.Config{}, 0, func(server *pgserver.Server) (err error) {
		g, err = grow(t.Context(), server, smallSizes)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct{ curves, points int }{{2, 2}, {3, 2}, {2, 2}, {3, 2}, {4, 2}} {
		p := g.plots()[i]
		if len(p.curves) != want.curves {
			t.Errorf("%s: %d curves", p.title, len(p.curves))
		}
		for _, c := range p.curves {
			if len(c.points) != want.points || c.points[0].x >= c.points[1].x {
				t.Errorf("%s, %s: %v", p.title, c.name, c.points)
			}
		}
	}
	for _, r := range g.renewed {
		if r.statements == 0 || r.wal == 0 || r.used.client == 0 || canCountServers && r.used.server == 0 {
			t.Errorf("renewals of %d leases: %+v", r.leases, r)
		}
	}
	g.machine = []string{"a machine"}
	folder := t.TempDir()
	if err := g.write(folder); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(folder, "sizing.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range g.plots() {
		if !strings.Contains(string(page), "]("+p.file+")") {
			t.Errorf("the page does not show %s", p.file)
		}
		chart, err := os.Open(filepath.Join(folder, p.file))
		if err != nil {
			t.Fatal(err)
		}
		defer chart.Close()
		circles, points := 0, 0
		for d := xml.NewDecoder(chart); ; {
			token, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", p.file, err)
			}
			if e, ok := token.(xml.StartElement); ok && e.Name.Local == "circle" {
				circles++
			}
		}
		for _, c := range p.curves {
			points += len(c.points)
		}
		if circles != points {
			t.Errorf("%s has %d points, not %d", p.file, circles, points)
		}
	}
	if words := len(strings.Fields(string(page))); words > 2000 || !strings.Contains(string(page), "The machine was") || !strings.Contains(string(page), "\n- lease: ") {
		t.Errorf("the page has %d words:\n%s", words, page)
	}
}

func TestProcessesThatDoNotConnectAreCounted(t *testing.T) {
	s := newStage(nil, 1)
	c, err := startCrewAt(t.Context(), s, "lease", "postgres:///nowhere?host=/nowhere", 0, 2, 1)
	if err != nil || len(c.lost) != 2 || len(c.children) != 0 {
		t.Errorf("%+v, %v", c, err)
	}
	if err := s.clear(); err != nil {
		t.Error(err)
	}
}

// 10,000 renewals every 10 s that take the server 0.2 s: one processor carries 50 times
// as many.
func TestCapacityOfADatabaseFollowsFromTheServersTime(t *testing.T) {
	r := renewing{leases: 10_000, window: 20 * time.Second, statements: 20, used: usage{server: 400 * time.Millisecond}}
	const ttl = 30 * time.Second
	if each, carried := r.each(ttl), r.carried(ttl); each != 20*time.Microsecond || carried != 500_000 {
		t.Errorf("%s each, %d leases", each, carried)
	}
	if n := r.perMinute(float64(r.statements)); n != 60 {
		t.Errorf("%v statements a minute", n)
	}
}
