package serve

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/monitor"
)

// A forest is who is in whose way: holders, the locks that somebody waits for, and waiters.
// It has locks as nodes of their own, so that 50 holders of a semaphore and 200 waiters are
// 250 lines and not 10,000.
type forest struct {
	nodes   []*node
	waits   *monitor.Waits
	holders map[monitor.LockID][]string
	waiter  map[*monitor.Waiter]*node
	links   map[[2]*node]struct{} // from what is in the way

	// What a page shows without a search, in its order.
	trees         [][]*node // the connected parts, those with deadlocks and the largest first
	queue         []*monitor.Waiter
	held, expired []*pgxlock.Holder
}

// A node is a lock, or who holds locks and waits for others.
type node struct {
	lock        bool
	kind        pgxlock.Kind // of a lock
	name        string
	label       string    // for a lock that is pgxlock's own
	since       time.Time // when it began to hold or, if it waits, to wait
	waits       bool
	before      []*node // what is in its way: of a waiter the lock, of a lock its holders
	behind      []*node
	cycle       int // the number of its circle, from 1; 0: none
	index, low  int
	stacked     bool
	layer       int
	x, y        float64
	collapsed   int // of how many waiters or holders it is the sign
	order       float64
	height, top float64
}

// plant makes the forest of a snapshot.
func plant(shot monitor.Snapshot) *forest {
	f := &forest{
		waits: shot.Waits(), holders: make(map[monitor.LockID][]string), waiter: make(map[*monitor.Waiter]*node), links: make(map[[2]*node]struct{}),
	}
	locks := make([]*node, len(f.waits.Queues))
	callers := make(map[*monitor.Waiter]*node) // who waits, with all that it holds
	for i, q := range f.waits.Queues {
		lock := f.add(&node{lock: true, kind: q.Kind, name: q.Key})
		if w := q.Waiters[0]; w.Internal {
			lock.label = w.Label
		}
		for _, w := range q.Waiters {
			who := callers[w.Caller]
			if who == nil {
				who = f.add(&node{name: w.Owner, since: w.Since, waits: true})
				callers[w.Caller] = who
			}
			f.waiter[w.Waiter] = who
			f.link(lock, who)
		}
		locks[i] = lock
	}
	type holderID struct {
		id  string
		pid int32
	}
	idle := make(map[holderID]*node) // holders that wait for nothing
	for i, q := range f.waits.Queues {
		for _, h := range q.Holders {
			who := callers[f.waits.Caller(h)]
			if id := (holderID{h.ID, h.PID}); who == nil {
				if who = idle[id]; who == nil {
					who = f.add(&node{name: h.ID, since: h.Since})
					idle[id] = who
				}
			}
			f.link(who, locks[i])
			f.holders[q.LockID] = append(f.holders[q.LockID], h.ID)
		}
	}
	f.held = f.byWaiters(shot.Holders)
	f.expired = f.byWaiters(shot.Expired)
	f.findCircles()
	f.trees = f.parts()
	for i := range shot.Waiters {
		f.queue = append(f.queue, &shot.Waiters[i])
	}
	slices.SortStableFunc(f.queue, func(a, b *monitor.Waiter) int { return readable.Earlier(a.Since, b.Since) })
	return f
}

// byWaiters returns the holders, those first for whose locks the most callers wait.
func (f *forest) byWaiters(all []pgxlock.Holder) []*pgxlock.Holder {
	sorted := make([]*pgxlock.Holder, len(all))
	counts := make(map[*pgxlock.Holder]int) // only those that are not 0
	for i := range all {
		sorted[i] = &all[i]
		if n := f.waits.Count(&all[i]); n > 0 {
			counts[&all[i]] = n
		}
	}
	if len(counts) > 0 {
		slices.SortStableFunc(sorted, func(a, b *pgxlock.Holder) int { return cmp.Compare(counts[b], counts[a]) })
	}
	return sorted
}

func (f *forest) add(n *node) *node {
	f.nodes = append(f.nodes, n)
	return n
}

// link says that one node is in the way of another.
func (f *forest) link(before, behind *node) {
	if _, linked := f.links[[2]*node{before, behind}]; !linked {
		f.links[[2]*node{before, behind}] = struct{}{}
		before.behind, behind.before = append(before.behind, behind), append(behind.before, before)
	}
}

// inTheWay returns who holds the lock that a waiter waits for.
func (f *forest) inTheWay(w *monitor.Waiter) []string { return f.holders[w.Lock()] }

// deadlocked reports whether a waiter waits in a circle.
func (f *forest) deadlocked(w *monitor.Waiter) bool {
	n := f.waiter[w]
	return n != nil && n.cycle > 0
}

// findCircles numbers the circles: Tarjan's algorithm for strongly connected components.
func (f *forest) findCircles() {
	next, circles := 0, 0
	var stack []*node
	var visit func(n *node)
	visit = func(n *node) {
		next++
		n.index, n.low, n.stacked = next, next, true
		stack = append(stack, n)
		for _, b := range n.behind {
			if b.index == 0 {
				visit(b)
				n.low = min(n.low, b.low)
			} else if b.stacked {
				n.low = min(n.low, b.index)
			}
		}
		if n.low != n.index {
			return
		}
		at := slices.Index(stack, n)
		circle := stack[at:]
		stack = stack[:at]
		if len(circle) > 1 {
			circles++
		}
		for _, c := range circle {
			if c.stacked = false; len(circle) > 1 {
				c.cycle = circles
			}
		}
	}
	for _, n := range f.nodes {
		if n.index == 0 {
			visit(n)
		}
	}
}

// A drawing is the forest, or what a query leaves of it, as SVG has it.
type drawing struct {
	Width, Height int
	Nodes         []box
	Lines         []arrow
	Deadlocks     []string
	Hidden        int // how many locks are not drawn
}

// tallest is how much of a drawing is seen without scrolling, as style.css has it.
const tallest = 460

// Tall reports whether a drawing must be scrolled.
func (d *drawing) Tall() bool { return d.Height > tallest }

type box struct {
	X, Y, Width, Height, Middle, First, Second int
	Class, Name, More, Full                    string
}

type arrow struct{ Path, Class string }

const (
	// mostDrawn is how many nodes a drawing has.
	mostDrawn = 300

	// rowWidth is how wide a row of trees may be: that of the page in a usual window. A
	// tree that is wider has a row of its own.
	rowWidth = 1240

	// mostAlike is how many waiters or holders of one lock are drawn, of those that only
	// wait for it, or only hold it.
	mostAlike = 5

	nodeWidth, lockWidth = 168, 146
	nodeHeight           = 36
	lockHeight           = 24
	columnGap, rowGap    = 40, 8
	columnStep           = nodeWidth + columnGap
	componentGap         = 22
	backRoom             = 24 // above a tree, for the arrow that closes its circle
	longestName          = 19
	margin               = 10
)

// draw lays out the trees that the query admits, those with deadlocks and the largest first,
// in rows.
func (f *forest) draw(at time.Time, q query) *drawing {
	d := &drawing{}
	drawn, x, y, bottom := 0, 0.0, float64(margin), 0.0
	s := &searcher{query: q, looks: mostLooks}
	for _, tree := range f.trees {
		if s.looks <= 0 {
			d.Hidden += countLocks(tree)
			continue
		}
		if !s.admits(tree) {
			continue
		}
		d.Deadlocks = append(d.Deadlocks, circles(tree)...)
		locks := countLocks(tree)
		if drawn >= mostDrawn {
			d.Hidden += locks
			continue
		}
		tree = prune(collapse(tree), mostDrawn-drawn)
		d.Hidden += locks - countLocks(tree)
		if len(tree) == 0 {
			continue
		}
		drawn += len(tree)
		back := layer(tree)
		width := 0.0
		for _, n := range tree {
			width = max(width, float64(n.layer*columnStep+nodeWidth))
		}
		if x > 0 && margin+x+width > rowWidth {
			x, y = 0, bottom+componentGap
		}
		top := y
		if len(back) > 0 {
			top += backRoom
		}
		bottom = max(bottom, place(tree, margin+x, top))
		d.add(tree, back, at)
		x += width + componentGap
		d.Width, d.Height = max(d.Width, int(x)-componentGap+2*margin), int(bottom)+margin
	}
	return d
}

func countLocks(tree []*node) (n int) {
	for _, one := range tree {
		n += btoi(one.lock)
	}
	return n
}

// prune returns at most so many nodes of a tree: circles first, then the locks that most wait
// for, each with its neighbors. It returns none where it would leave a small tree in pieces.
func prune(tree []*node, most int) []*node {
	if len(tree) <= most {
		return tree
	}
	if len(tree) <= mostDrawn {
		return nil
	}
	sorted := slices.Clone(tree)
	slices.SortStableFunc(sorted, func(a, b *node) int {
		return cmp.Or(cmp.Compare(btoi(b.cycle > 0), btoi(a.cycle > 0)), cmp.Compare(btoi(b.lock), btoi(a.lock)), cmp.Compare(len(b.behind), len(a.behind)))
	})
	copies := make(map[*node]*node)
	var kept []*node
	for _, n := range sorted {
		for _, one := range slices.Concat([]*node{n}, n.before, n.behind) {
			if copies[one] == nil && len(kept) < most {
				c := *one
				copies[one] = &c
				kept = append(kept, &c)
			}
		}
	}
	for _, c := range kept {
		c.before, c.behind = translated(c.before, copies), translated(c.behind, copies)
	}
	return kept
}

// admits reports whether a tree has a lock of the kind that the query asks for, and a node with all
// its words.
func (s *searcher) admits(tree []*node) bool {
	ofKind := slices.ContainsFunc(tree, func(n *node) bool { return n.lock && (s.Kind == "" || s.Kind == n.kind.String()) })
	return ofKind && slices.ContainsFunc(tree, func(n *node) bool { return s.looks > 0 && s.matches(n.name, n.label) })
}

// parts returns the connected parts, those with deadlocks and the largest first.
func (f *forest) parts() [][]*node {
	var trees [][]*node
	seen := make(map[*node]bool)
	for _, n := range f.nodes {
		if seen[n] {
			continue
		}
		seen[n] = true
		tree := []*node{n}
		for i := 0; i < len(tree); i++ {
			for _, side := range [][]*node{tree[i].before, tree[i].behind} {
				for _, next := range side {
					if !seen[next] {
						seen[next] = true
						tree = append(tree, next)
					}
				}
			}
		}
		trees = append(trees, tree)
	}
	circle := func(tree []*node) int {
		return btoi(slices.ContainsFunc(tree, func(n *node) bool { return n.cycle > 0 }))
	}
	slices.SortStableFunc(trees, func(a, b []*node) int {
		return cmp.Or(circle(b)-circle(a), len(b)-len(a), strings.Compare(a[0].name, b[0].name))
	})
	return trees
}

// circles describes the circles of a tree: who waits for a lock of whom, and so on.
func circles(tree []*node) []string {
	var all []string
	done := make(map[int]bool)
	for _, n := range tree {
		if n.cycle == 0 || n.lock || done[n.cycle] {
			continue
		}
		done[n.cycle] = true
		// A walk inside the circle comes back to a node that it has passed.
		passed, at := []*node{n}, n
		for {
			at = at.before[slices.IndexFunc(at.before, func(b *node) bool { return b.cycle == n.cycle })]
			if i := slices.Index(passed, at); i >= 0 {
				passed = append(passed[i:], at)
				break
			}
			passed = append(passed, at)
		}
		if passed[0].lock { // begin with who waits
			passed = append(passed[1:], passed[1])
		}
		var text strings.Builder
		for i, p := range passed {
			switch {
			case i == 0:
				text.WriteString(name(p))
			case p.lock:
				text.WriteString(" waits for " + name(p))
			default:
				text.WriteString(", held by " + name(p))
			}
		}
		all = append(all, text.String())
	}
	return all
}

func name(n *node) string {
	if n.label != "" {
		return "(" + text(n.label) + ")"
	}
	return text(n.name)
}

// collapse returns a tree in which few of those are left that do the same to the same lock,
// and one node counts the others.
func collapse(tree []*node) []*node {
	gone := make(map[*node]bool)
	var signs []*node
	for _, lock := range tree {
		if !lock.lock {
			continue
		}
		for _, side := range []struct {
			of    *[]*node
			alike func(*node) bool
			waits bool
		}{
			{&lock.behind, func(n *node) bool { return len(n.behind) == 0 && len(n.before) == 1 }, true},
			{&lock.before, func(n *node) bool { return len(n.before) == 0 && len(n.behind) == 1 }, false},
		} {
			var alike []*node
			for _, n := range *side.of {
				if side.alike(n) {
					alike = append(alike, n)
				}
			}
			if len(alike) <= mostAlike {
				continue
			}
			slices.SortStableFunc(alike, func(a, b *node) int { return readable.Earlier(a.since, b.since) })
			rest := alike[mostAlike-1:]
			sign := &node{collapsed: len(rest), waits: side.waits, since: rest[0].since}
			for _, n := range rest {
				gone[n] = true
			}
			// The forest serves other queries too: the lock that is drawn is a copy.
			signs = append(signs, sign)
			if side.waits {
				sign.before = []*node{lock}
			} else {
				sign.behind = []*node{lock}
			}
		}
	}
	copies := make(map[*node]*node)
	var kept []*node
	for _, n := range slices.Concat(tree, signs) {
		if !gone[n] {
			c := *n
			copies[n] = &c
			kept = append(kept, &c)
		}
	}
	for _, c := range kept {
		c.before, c.behind = translated(c.before, copies), translated(c.behind, copies)
	}
	for _, sign := range signs { // whose lock does not know it yet
		c := copies[sign]
		for _, lock := range c.before {
			lock.behind = append(lock.behind, c)
		}
		for _, lock := range c.behind {
			lock.before = append(lock.before, c)
		}
	}
	return kept
}

func translated(all []*node, to map[*node]*node) (some []*node) {
	for _, n := range all {
		if c := to[n]; c != nil {
			some = append(some, c)
		}
	}
	return some
}

// layer gives each node the layer behind all that is in its way, and returns the lines that
// close a circle, which have no place in layers.
func layer(tree []*node) (back map[[2]*node]bool) {
	back = make(map[[2]*node]bool)
	const open, closed = 1, 2
	visited := make(map[*node]int)
	var sorted []*node // the last first
	var visit func(n *node)
	visit = func(n *node) {
		visited[n] = open
		for _, b := range n.behind {
			switch visited[b] {
			case open:
				back[[2]*node{n, b}] = true
			case 0:
				visit(b)
			}
		}
		visited[n] = closed
		sorted = append(sorted, n)
	}
	roots := slices.Clone(tree)
	slices.SortStableFunc(roots, func(a, b *node) int { // holders that wait for nothing, then others before locks
		return cmp.Or(cmp.Compare(btoi(len(a.before) > 0), btoi(len(b.before) > 0)), cmp.Compare(btoi(a.lock), btoi(b.lock)))
	})
	for _, n := range roots {
		if visited[n] == 0 {
			visit(n)
		}
	}
	for i := len(sorted) - 1; i >= 0; i-- {
		n := sorted[i]
		for _, b := range n.behind {
			if !back[[2]*node{n, b}] {
				b.layer = max(b.layer, n.layer+1)
			}
		}
	}
	return back
}

// place gives each node its place, to the right of and below a point, and returns where the
// tree ends.
func place(tree []*node, left, from float64) (bottom float64) {
	layers := make(map[int][]*node)
	for _, n := range tree {
		n.height = nodeHeight
		if n.lock {
			n.height = lockHeight
		}
		layers[n.layer] = append(layers[n.layer], n)
	}
	order := slices.Sorted(maps.Keys(layers))
	for _, l := range order {
		y := 0.0
		for _, n := range layers[l] {
			n.top = y
			y += n.height + rowGap
		}
	}
	middle := func(n *node) float64 { return n.top + n.height/2 }
	// Each layer moves to where its neighbors are, from the left, from the right, and again.
	for round := range 6 {
		for i := range order {
			l := order[i]
			neighbors := func(n *node) []*node { return n.before }
			if round%2 == 1 {
				l = order[len(order)-1-i]
				neighbors = func(n *node) []*node { return n.behind }
			}
			for _, n := range layers[l] {
				n.order = middle(n)
				if near := neighbors(n); len(near) > 0 {
					n.order = 0
					for _, m := range near {
						n.order += middle(m) / float64(len(near))
					}
				}
			}
			slices.SortStableFunc(layers[l], func(a, b *node) int {
				return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.collapsed, b.collapsed))
			})
			y, off := math.Inf(-1), 0.0
			for _, n := range layers[l] {
				n.top = max(y, n.order-n.height/2)
				y = n.top + n.height + rowGap
				off += (middle(n) - n.order) / float64(len(layers[l]))
			}
			for _, n := range layers[l] {
				n.top -= off
			}
		}
	}
	top := math.Inf(1)
	for _, n := range tree {
		top = min(top, n.top)
	}
	for _, n := range tree {
		n.y = n.top - top + from
		n.x = left + float64(n.layer*columnStep)
		if n.lock {
			n.x += (nodeWidth - lockWidth) / 2
		}
		bottom = max(bottom, n.y+n.height)
	}
	return bottom
}

// add draws a tree.
func (d *drawing) add(tree []*node, back map[[2]*node]bool, at time.Time) {
	top := slices.MinFunc(tree, func(a, b *node) int { return cmp.Compare(a.y, b.y) }).y
	for _, n := range tree {
		b := box{X: int(n.x), Y: int(n.y), Width: nodeWidth, Height: int(n.height), Full: name(n), Class: "who"}
		b.Name = readable.Shortened(b.Full, longestName)
		switch {
		case n.collapsed > 0 && n.waits:
			b.Class, b.Name, b.More = "more", "and "+grouped(n.collapsed)+" more", "waiting"
		case n.collapsed > 0:
			b.Class, b.Name, b.More = "more", "and "+grouped(n.collapsed)+" more", "holding"
		case n.lock:
			b.Class, b.Width, b.Name = "lock", lockWidth, readable.Shortened(b.Full, longestName-1)
		case n.waits:
			b.Class, b.More = "waiter", "waits"
		default:
			b.Class, b.More = "who", "holds"
		}
		if age := readable.Age(at, n.since); age != "" && b.More != "" {
			b.More += " for " + age
			if n.collapsed > 0 {
				b.More += " at most"
			}
		}
		if n.cycle > 0 {
			b.Class += " circle"
		}
		b.Middle, b.First, b.Second = b.X+b.Width/2, b.Y+15, b.Y+29
		if n.lock {
			b.First = b.Y + 16
		}
		d.Nodes = append(d.Nodes, b)
		for _, m := range n.behind {
			d.Lines = append(d.Lines, line(n, m, back[[2]*node{n, m}], top))
		}
	}
}

// line is an arrow from what is behind to what is in its way, in a tree that begins at top.
func line(before, behind *node, back bool, top float64) arrow {
	width := func(n *node) float64 {
		if n.lock {
			return lockWidth
		}
		return nodeWidth
	}
	class := "line"
	if before.cycle > 0 && before.cycle == behind.cycle {
		class += " circle"
	}
	if back {
		x1, y1 := behind.x+width(behind)/2, behind.y
		x2, y2 := before.x+width(before)/2, before.y
		y := top - backRoom*4/3 // the curve rises to three quarters of that
		return arrow{fmt.Sprintf("M%.0f %.0fC%.0f %.0f %.0f %.0f %.0f %.0f", x1, y1, x1, y, x2, y, x2, y2-3), class}
	}
	x1, y1 := behind.x, behind.y+behind.height/2
	x2, y2 := before.x+width(before)+4, before.y+before.height/2
	bend := min((x1-x2)/2, columnGap)
	return arrow{fmt.Sprintf("M%.0f %.0fC%.0f %.0f %.0f %.0f %.0f %.0f", x1, y1, x1-bend, y1, x2+bend, y2, x2, y2), class}
}

// Summary says what is drawn, for readers who cannot see it.
func (d *drawing) Summary() string {
	return fmt.Sprintf("who is in whose way: %d boxes, %d arrows", len(d.Nodes), len(d.Lines))
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}
