package main

import (
	"fmt"
	"maps"
	"math"
	"slices"
)

// A graph is boxes in rows, with arrows from one row to the next: an arrow that goes further
// passes through a point of each row between.
type graph struct{ rows [][]*point }

type point struct {
	name     string
	passes   bool // it is no box: an arrow passes
	x        int
	at       float64 // x while it is sought
	width    int
	up, down []*point
}

func newGraph(arrows map[string][]string, row map[string]int, width func(name string) int) *graph {
	g := new(graph)
	add := func(row int, name string, passes bool) *point {
		for len(g.rows) <= row {
			g.rows = append(g.rows, nil)
		}
		p := &point{name: name, passes: passes, width: width(name)}
		g.rows[row] = append(g.rows[row], p)
		return p
	}
	boxes := make(map[string]*point)
	for _, name := range slices.Sorted(maps.Keys(row)) {
		boxes[name] = add(row[name], name, false)
	}
	for _, from := range slices.Sorted(maps.Keys(arrows)) {
		for _, to := range arrows[from] {
			p := boxes[from]
			for i := row[from] + 1; i < row[to]; i++ {
				// Arrows to the same box share their way.
				name := fmt.Sprintf("-> %s in row %d", to, i)
				through := boxes[name]
				if through == nil {
					through = add(i, name, true)
					boxes[name] = through
				}
				if !slices.Contains(p.down, through) {
					p.down, through.up = append(p.down, through), append(through.up, p)
				}
				p = through
			}
			if end := boxes[to]; !slices.Contains(p.down, end) {
				p.down, end.up = append(p.down, end), append(end.up, p)
			}
		}
	}
	return g
}

// crossings counts how many pairs of arrows cross.
func (g *graph) crossings() (n int) {
	for _, row := range g.rows {
		for i, left := range row {
			for _, right := range row[i+1:] {
				for _, a := range left.down {
					for _, b := range right.down {
						if g.index(a) > g.index(b) {
							n++
						}
					}
				}
			}
		}
	}
	return n
}

func (g *graph) index(p *point) int {
	for _, row := range g.rows {
		if i := slices.Index(row, p); i >= 0 {
			return i
		}
	}
	return -1
}

// place gives each point its x between two borders: it orders each row so that few arrows
// cross, and then moves each point as near to its neighbours above and below as the others
// of its row allow.
func (g *graph) place(from, to int) {
	g.order()
	for _, row := range g.rows {
		for i, p := range row {
			p.at = float64(from) + float64(to-from)*(float64(i)+0.5)/float64(len(row))
		}
	}
	for range 60 {
		for _, row := range g.rows {
			g.settle(row, from, to)
		}
		for _, row := range slices.Backward(g.rows) {
			g.settle(row, from, to)
		}
	}
	for _, row := range g.rows {
		for _, p := range row {
			p.x = int(math.Round(p.at))
		}
	}
}

// settle moves the points of a row to the mean of their neighbours, and apart.
func (g *graph) settle(row []*point, from, to int) {
	// A run is points beside each other without a gap: it is where the mean of its points wants to be.
	type run struct {
		start, width, wish, weight float64
		points                     []*point
	}
	var runs []run
	for _, p := range row {
		wish, n := p.at, 0.0
		sum := 0.0
		for _, other := range slices.Concat(p.up, p.down) {
			weight := 1.0
			if p.passes && other.passes {
				weight = 8 // an arrow that bends is uglier than one that leans
			}
			sum += weight * other.at
			n += weight
		}
		if n > 0 {
			wish = sum / n
		}
		width := float64(p.width)
		r := run{width: width, wish: wish - width/2, weight: 1, points: []*point{p}}
		for {
			r.start = max(r.wish/r.weight, float64(from))
			if last := len(runs) - 1; last >= 0 && runs[last].start+runs[last].width > r.start {
				before := runs[last]
				runs = runs[:last]
				r = run{width: before.width + r.width, wish: before.wish + r.wish - before.width*r.weight, weight: before.weight + r.weight, points: append(before.points, r.points...)}
				continue
			}
			break
		}
		runs = append(runs, r)
	}
	limit := float64(to)
	for i := range slices.Backward(runs) {
		runs[i].start = min(runs[i].start, limit-runs[i].width)
		limit = runs[i].start
		x := runs[i].start
		for _, p := range runs[i].points {
			p.at = x + float64(p.width)/2
			x += float64(p.width)
		}
	}
}

// order sorts each row by where its neighbours are, and then exchanges pairs, as long as
// arrows cross less.
func (g *graph) order() {
	best, least := g.copied(), g.crossings()
	keep := func() {
		if n := g.crossings(); n < least {
			best, least = g.copied(), n
		}
	}
	for range 12 {
		for _, up := range []bool{true, false} {
			rows := slices.Collect(slices.Values(g.rows))
			if !up {
				slices.Reverse(rows)
			}
			for _, row := range rows {
				mean := make(map[*point]float64)
				for i, p := range row {
					beside := p.down
					if up {
						beside = p.up
					}
					mean[p] = float64(i)
					for j, other := range beside {
						if j == 0 {
							mean[p] = 0
						}
						mean[p] += float64(g.index(other)) / float64(len(beside))
					}
				}
				slices.SortStableFunc(row, func(a, b *point) int {
					switch {
					case mean[a] < mean[b]:
						return -1
					case mean[a] > mean[b]:
						return 1
					}
					return 0
				})
			}
			keep()
		}
	}
	g.rows = best
	for changed := true; changed; {
		changed = false
		for _, row := range g.rows {
			for i := range row {
				for j := range i {
					row[i], row[j] = row[j], row[i]
					if n := g.crossings(); n < least {
						least, changed = n, true
					} else {
						row[i], row[j] = row[j], row[i]
					}
				}
			}
		}
	}
}

func (g *graph) copied() [][]*point {
	rows := make([][]*point, len(g.rows))
	for i, row := range g.rows {
		rows[i] = slices.Clone(row)
	}
	return rows
}
