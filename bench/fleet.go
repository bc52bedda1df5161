package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// fleetCallers is how many callers each process of a fleet has.
const fleetCallers = 4

var fleetSizes = []int{1, 4, 16, 48, 64}

// mostLeases is how many processes a fleet with leases has at most: more have no
// connections left beside the others.
const mostLeases = 16

// A fleetSize is what fleets of so many processes did, which took turns.
type fleetSize struct {
	processes int
	ways      []fleetWay
}

// A fleetWay is what the processes of one way did, each with keys of its own.
type fleetWay struct {
	name      string
	rates     []float64 // pairs a second, of each round
	used      usage     // for a pair
	connected float64   // the share of the processes
}

func (w fleetWay) perSecond() float64 { return quantile(w.rates, 0.5) }

// fleet starts n processes of each way, and has the fleets take turns.
func fleet(ctx context.Context, s *stage, ways []string, n, rounds int, span time.Duration) (f fleetSize, err error) {
	f.processes = n
	var crews []*crew
	defer func() {
		for _, c := range crews {
			err = errors.Join(err, c.end())
		}
	}()
	for _, way := range ways {
		c, err := startCrew(ctx, s, way, n, fleetCallers)
		if err != nil {
			return f, fmt.Errorf("%s: %w", way, err)
		}
		crews = append(crews, c)
		if len(c.children) == 0 {
			return f, errors.Join(c.lost...)
		}
	}
	responses, err := takeTurns(crews, rounds, order{Do: doPairs, Callers: fleetCallers, Span: span})
	if err != nil {
		return f, err
	}
	for _, c := range crews {
		w := fleetWayOf(c.way, responses[c.way])
		w.connected = float64(len(c.children)) / float64(n)
		f.ways = append(f.ways, w)
	}
	return f, nil
}

func fleetWayOf(name string, rounds []response) fleetWay {
	w := fleetWay{name: name}
	var used usage
	pairs := 0
	for _, r := range rounds {
		w.rates = append(w.rates, r.perSecond())
		used = used.plus(r.used())
		pairs += r.done()
	}
	w.used = usage{used.client / time.Duration(pairs), used.server / time.Duration(pairs)}
	return w
}

const (
	fleetRounds = 3

	// fleetParts is into how many slices -time is divided.
	fleetParts = 6
)

func takeFleet(ctx context.Context, s *stage, span time.Duration) ([]finding, []grid, error) {
	var all []fleetSize
	for _, n := range fleetSizes {
		ways := []string{"advisory", "bare"}
		if n <= mostLeases {
			ways = append(ways, "lease")
		}
		f, err := fleet(ctx, s, ways, n, fleetRounds, span/fleetParts)
		if err != nil {
			return nil, nil, err
		}
		all = append(all, f)
	}
	return fleetFindings(all), []grid{fleetGrid(all)}, nil
}

// The names of findings about a number of processes.
func fleetOverBare(n int) string { return fmt.Sprintf("advisory/bare, %s", processes(n)) }

func fleetOverOne(n int) string {
	return fmt.Sprintf("processor time of a pair, %s over 1", processes(n))
}
func fleetConnected(n int) string { return fmt.Sprintf("share that connected, %s", processes(n)) }

func processes(n int) string {
	if n == 1 {
		return "1 process"
	}
	return fmt.Sprintf("%d processes", n)
}

// fleetFindings compares advisory locks with bare pgx, and with themselves in the first
// fleet.
func fleetFindings(all []fleetSize) (found []finding) {
	for _, f := range all {
		ours, bare := f.ways[0], f.ways[1]
		found = append(found,
			finding{fleetOverBare(f.processes), ratioOf(ours.rates, bare.rates), ""},
			finding{fleetOverOne(f.processes), float64(ours.used.client) / float64(all[0].ways[0].used.client), ""},
			finding{fleetConnected(f.processes), ours.connected, ""},
		)
	}
	return found
}

func fleetGrid(all []fleetSize) grid {
	g := grid{
		title: "A fleet of small processes",
		means: fmt.Sprintf("Processes of %d callers, with keys of their own: how the cost of a pair grows as processes are added. *bare* is pgx with one connection, a mutex, and `pg_try_advisory_lock` and `pg_advisory_unlock`, two round trips a pair. "+
			"*client* and *server* are processor time for a pair, in µs.", fleetCallers),
		head: []string{"processes", "way", "pairs/s", "client", "server"},
	}
	for _, f := range all {
		for _, w := range f.ways {
			g.lines = append(g.lines, []string{fmt.Sprint(f.processes), w.name, rate(w.perSecond()), inMicros(w.used.client), inServerMicros(w.used.server)})
		}
	}
	return g
}
