package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// sizes are how far costs are followed.
type sizes struct {
	callers, processes, held, waiters, renewed []int
	span                                       time.Duration // for each point
	ttl                                        time.Duration // of leases that are renewed, every third of it
}

var (
	fullSizes = sizes{
		callers: []int{1, 4, 16, 64, 256, 1024}, processes: []int{1, 2, 4, 8, 16, 32, 64},
		held: []int{1000, 10_000, 100_000, 1_000_000}, waiters: []int{10, 100, 1000, 5000},
		renewed: []int{100, 1000, 10_000}, span: 2 * time.Second, ttl: 30 * time.Second,
	}
	smallSizes = sizes{
		callers: []int{1, 4}, processes: []int{1, 2}, held: []int{10, 100}, waiters: []int{2, 5},
		renewed: []int{10, 20}, span: 20 * time.Millisecond, ttl: 3 * time.Second,
	}
)

// A plot is one way in which a cost grows.
type plot struct {
	file, title, of, unit string // of: what grows, on the x axis; unit: of the values
	curves                []curve
}

type curve struct {
	name   string
	points []point
}

type point struct{ x, y float64 }

func (p *plot) add(name string, x int, y float64) {
	i := slices.IndexFunc(p.curves, func(c curve) bool { return c.name == name })
	if i < 0 {
		i = len(p.curves)
		p.curves = append(p.curves, curve{name: name})
	}
	p.curves[i].points = append(p.curves[i].points, point{float64(x), y})
	fmt.Printf("GROWTH %s, %d %s, %s: %.4g %s\n", p.title, x, p.of, name, y, p.unit)
}

// A renewing is what the renewals of so many leases took in a window of time.
type renewing struct {
	leases     int
	window     time.Duration
	statements int64
	wal        int64 // bytes
	used       usage
}

// perMinute scales a number to a minute.
func (r renewing) perMinute(n float64) float64 { return n * float64(time.Minute) / float64(r.window) }

// each is the server's time for one renewal, of which each lease has three in a TTL.
func (r renewing) each(ttl time.Duration) time.Duration {
	return time.Duration(float64(r.used.server) / (float64(r.leases) * float64(r.window) / float64(ttl/3)))
}

// growth is what a run found.
type growth struct {
	machine                                     []string
	sizes                                       sizes
	calm                                        calm
	callers, processes, held, waiting, renewals plot
	renewed                                     []renewing
	fleets                                      []fleetSize
	hot                                         hotSetting
}

func (g *growth) plots() []*plot {
	return []*plot{&g.callers, &g.processes, &g.held, &g.waiting, &g.renewals}
}

func measureGrowth(ctx context.Context, small bool, folder string) error {
	of := fullSizes
	if small {
		of = smallSizes
	}
	return withServer(ctx, onDisk, 0, func(server *pgserver.Server) error {
		sync, err := syncTime(filepath.Dir(server.DataDir()))
		if err != nil {
			return err
		}
		g, err := grow(ctx, server, of)
		if err != nil {
			return err
		}
		fmt.Println(g.calm)
		if folder == "" {
			return nil
		}
		if g.machine, err = describe(server.Version(), nil, sync); err != nil {
			return err
		}
		return g.write(folder)
	})
}

// grow measures each size of each kind.
func grow(ctx context.Context, server *pgserver.Server, of sizes) (g growth, err error) {
	g.sizes = of
	g.callers = plot{"sizing-callers.svg", "Pairs a second, by callers of one process", "callers", "pairs/s", nil}
	g.processes = plot{"sizing-processes.svg", "Pairs a second, by processes of 4 callers", "processes", "pairs/s", nil}
	g.held = plot{"sizing-held.svg", "One pair of 32 callers, by other leases held", "leases", "µs", nil}
	g.waiting = plot{"sizing-waiters.svg", "Waiters, each for a lock of its own", "waiters", "µs", nil}
	g.renewals = plot{"sizing-renewals.svg", "Renewals, every third of the TTL, by leases held", "leases", "a minute", nil}
	watch, err := newWatch(ctx, server)
	if err != nil {
		return g, err
	}
	defer watch.end(&g.calm, &err)
	for _, part := range []struct {
		sizes []int
		grow  func(context.Context, *stage, int) error
	}{
		{of.callers, g.growCallers},
		{of.processes, g.growProcesses},
		{[]int{shown.processes}, g.contend},
		{[]int{32}, g.growHeld},
		{of.waiters, g.growWaiters},
		{of.renewed, g.growRenewals},
	} {
		for _, n := range part.sizes {
			if err := watch.look(ctx); err != nil {
				return g, err
			}
			s := newStage(server, 32)
			if err := errors.Join(part.grow(ctx, s, n), s.clear()); err != nil {
				return g, err
			}
		}
	}
	return g, watch.look(ctx)
}

func (g *growth) growCallers(ctx context.Context, s *stage, n int) error {
	r := row{title: "callers", workers: n, ratios: []ratio{{"advisory", "lease"}}, prepare: tables[0].prepare}
	m, err := r.measure(ctx, s.server, g.sizes.span)
	for _, w := range m.ways {
		g.callers.add(w.name, n, w.perSecond)
	}
	return err
}

// growProcesses has one fleet after the other: all at a time need more connections than
// the server has.
func (g *growth) growProcesses(ctx context.Context, s *stage, n int) error {
	size := fleetSize{processes: n}
	for _, way := range []string{"advisory", "bare", "lease"} {
		f, err := fleet(ctx, s, []string{way}, n, 1, g.sizes.span)
		if err != nil {
			return fmt.Errorf("%s: %w", processes(n), err)
		}
		size.ways = append(size.ways, f.ways...)
		g.processes.add(way, n, f.ways[0].perSecond())
	}
	g.fleets = append(g.fleets, size)
	return nil
}

// contend is one setting of the survey: what a key can pass on.
func (g *growth) contend(ctx context.Context, s *stage, _ int) error {
	all, err := contend(ctx, s, []string{"advisory", "lease"}, []setting{shown}, g.sizes.span/time.Duration(shown.rounds))
	if err == nil {
		g.hot = all[0]
	}
	return err
}

// growHeld has all sizes take turns.
func (g *growth) growHeld(ctx context.Context, s *stage, workers int) error {
	name := func(n int) string { return fmt.Sprintf("lease-%d", n) }
	least, most := g.sizes.held[0], g.sizes.held[len(g.sizes.held)-1]
	r := row{title: "held", workers: workers, ratios: []ratio{{name(most), name(least)}}}
	r.prepare = func(ctx context.Context, s *stage, _ []string) (ways []way, err error) {
		for _, n := range g.sizes.held {
			do, err := leaseBeside(ctx, s, n)
			if err != nil {
				return nil, err
			}
			ways = append(ways, s.way(name(n), do))
		}
		return ways, nil
	}
	m, err := r.measure(ctx, s.server, g.sizes.span)
	for i, w := range m.ways {
		g.held.add("as a caller sees it", g.sizes.held[i], micro(w.each))
		g.held.add("the server's processors", g.sizes.held[i], micro(w.used.server))
	}
	return err
}

func micro(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// growWaiters has one Locker hold n leases for which callers of another wait, and then
// releases some of them, one after the other.
func (g *growth) growWaiters(ctx context.Context, s *stage, n int) error {
	pool, err := s.installed(ctx, "")
	if err != nil {
		return err
	}
	holder, err := s.locker(pool, &pgxlock.LeaseConfig{TTL: time.Hour})
	if err != nil {
		return err
	}
	waiter, err := s.locker(pool, &pgxlock.LeaseConfig{TTL: time.Hour})
	if err != nil {
		return err
	}
	held, err := hold(ctx, holder, n)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	type grant struct {
		at  time.Time
		err error
	}
	grants := make(chan grant)
	for _, lock := range held {
		go func() {
			_, err := waiter.Acquire(ctx, lock.Key())
			select {
			case grants <- grant{time.Now(), err}:
			case <-ctx.Done():
			}
		}()
	}
	defer cancel()
	for tickets := 0; tickets < n; {
		if err := pool.QueryRow(ctx, "SELECT count(*) FROM pgxlock_waiters").Scan(&tickets); err != nil {
			return err
		}
	}
	count, err := countUsage(s.server.PID())
	if err != nil {
		return err
	}
	begun := time.Now()
	if err := pause(ctx, g.sizes.span); err != nil {
		return err
	}
	used, err := count()
	if err != nil {
		return err
	}
	seconds := time.Since(begun).Seconds()
	var gaps []time.Duration
	for _, lock := range held[:min(n, 100)] {
		begun := time.Now()
		if err := lock.Release(ctx); err != nil {
			return err
		}
		got := <-grants
		if got.err != nil {
			return got.err
		}
		gaps = append(gaps, got.at.Sub(begun))
	}
	g.waiting.add("from release to grant (median)", n, micro(quantile(gaps, 0.5)))
	g.waiting.add("server's processors, a second of waiting", n, micro(used.server)/seconds)
	g.waiting.add("client's processors, a second of waiting", n, micro(used.client)/seconds)
	return nil
}

// pause is a while in which things happen that are counted.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// growRenewals counts what two intervals of renewals take.
func (g *growth) growRenewals(ctx context.Context, s *stage, n int) error {
	count := &statements{word: "-- Renews each lease"}
	traced, err := s.traced(ctx, count)
	if err != nil {
		return err
	}
	locks, err := s.locker(traced, &pgxlock.LeaseConfig{TTL: g.sizes.ttl})
	if err != nil {
		return err
	}
	held, err := hold(ctx, locks, n)
	if err != nil {
		return err
	}
	written := func() (wal int64, err error) {
		err = traced.QueryRow(ctx, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").Scan(&wal)
		return wal, err
	}
	wal, err := written()
	if err != nil {
		return err
	}
	used, err := countUsage(s.server.PID())
	if err != nil {
		return err
	}
	sent, begun := count.n.Load(), time.Now()
	if err := pause(ctx, 2*g.sizes.ttl/3); err != nil {
		return err
	}
	r := renewing{leases: n, window: time.Since(begun), statements: count.n.Load() - sent}
	if r.used, err = used(); err != nil {
		return err
	}
	walAfter, err := written()
	if err != nil {
		return err
	}
	r.wal = walAfter - wal
	for _, lock := range held {
		if err := lock.Err(); err != nil {
			return err
		}
	}
	g.renewed = append(g.renewed, r)
	g.renewals.add("statements", n, r.perMinute(float64(r.statements)))
	g.renewals.add("WAL, kB", n, r.perMinute(float64(r.wal)/1000))
	g.renewals.add("server's processors, ms", n, r.perMinute(micro(r.used.server)/1000))
	g.renewals.add("client's processors, ms", n, r.perMinute(micro(r.used.client)/1000))
	return nil
}

// write replaces sizing.md and its charts in the folder.
func (g *growth) write(folder string) error {
	errs := []error{os.WriteFile(filepath.Join(folder, "sizing.md"), []byte(g.page()), 0o644)}
	for _, p := range g.plots() {
		errs = append(errs, os.WriteFile(filepath.Join(folder, p.file), []byte(p.draw()), 0o644))
	}
	return errors.Join(errs...)
}

// carried is how many leases two processors of a server carry by renewals alone, if these
// may take half of them.
func (r renewing) carried(ttl time.Duration) int {
	const processors, share = 2, 0.5
	return int(processors * share * float64(ttl/3) / float64(max(r.each(ttl), 1)))
}

// page says what the growth means for sizing.
func (g *growth) page() string {
	var text strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&text, format, args...) }
	say("# Sizing: how costs grow\n\nWritten by `make bench-growth`. The figures are those of this machine on that day, with the server and all programs on\n")
	say("its %d processors; [Figures](figures.md) compares pgxlock with other locks.\n\n", runtime.NumCPU())
	for _, line := range g.machine {
		say("- %s\n", line)
	}
	say("- %s\n", g.calm)
	last := g.renewed[len(g.renewed)-1]
	say("\n## How many leases a database carries\n\n")
	say("%d leases with a TTL of %s, each renewed every %s, take a minute:\n\n", last.leases, g.sizes.ttl, g.sizes.ttl/3)
	say("- %.0f statements, because a Locker renews up to 1,024 leases at a time,\n", last.perMinute(float64(last.statements)))
	say("- %.1f MB of write-ahead log, and for some minutes after each checkpoint whole pages of the table in addition,\n", last.perMinute(float64(last.wal))/1e6)
	say("- %.2f s of the server's processors, and %.2f s of the program's.\n\n", last.perMinute(last.used.server.Seconds()), last.perMinute(last.used.client.Seconds()))
	say("That is %s µs of the server for a renewal. **A database with 2 processors, half of them for renewals, carries about\n", inMicros(last.each(g.sizes.ttl)))
	say("%s leases that are renewed every %s.** With a TTL twice as long it carries twice as many.\n\n", rate(float64(last.carried(g.sizes.ttl))), g.sizes.ttl/3)
	say("![%s](%s)\n", g.renewals.title, g.renewals.file)
	for _, s := range []struct {
		heading, meaning string
		plot             *plot
	}{
		{"Callers of a process", "Callers of one process share statements and commits, so add callers, not Lockers.", &g.callers},
		{"Processes", "Each process sends statements of its own, with at most 4 requests in each here: more processes share less. Plan for [three connections](connections.md) for each.", &g.processes},
		{"Leases held by others", "A lease is found by its name, in an index: how many others there are matters little.", &g.held},
		{"Waiters", "A waiter of a lock that others of its process do not wait for costs a row, and its share of one statement a second.", &g.waiting},
	} {
		say("\n## %s\n\n%s\n\n![%s](%s)\n\n%s", s.heading, s.meaning, s.plot.title, s.plot.file, s.plot.table())
		if s.plot == &g.processes {
			text.WriteString(g.expectation())
		}
	}
	return text.String()
}

// expectation says what several processes get.
func (g *growth) expectation() string {
	var text strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&text, format, args...) }
	one, most := g.fleets[0], g.fleets[len(g.fleets)-1]
	best := slices.MaxFunc(g.fleets, func(a, b fleetSize) int { return cmp.Compare(a.ways[0].perSecond(), b.ways[0].perSecond()) })
	say("\n## What can a fleet, or a hot key, expect?\n\n")
	say("On %d processors, which the server shares with them, advisory locks reach %s pairs/s at best, with %s of %d\n",
		runtime.NumCPU(), rate(best.ways[0].perSecond()), processes(best.processes), fleetCallers)
	say("callers each. With %s they do %s, and bare pgx with one connection for each process does %s. A pair takes\n",
		processes(most.processes), rate(most.ways[0].perSecond()), rate(most.ways[1].perSecond()))
	say("%s µs of the program's processors with %s, and %s µs with %s.\n\n",
		inMicros(one.ways[0].used.client), processes(one.processes), inMicros(most.ways[0].used.client), processes(most.processes))
	say("A key that all callers want has one holder at a time. Callers of one process pass it on in one message; from process\n")
	say("to process it takes several, and a notification: so few processes of many callers get more than many of one caller.\n")
	say("With %s of %d callers that keep it for no time:\n\n", processes(g.hot.processes), g.hot.callers)
	for _, w := range g.hot.ways {
		say("- %s: %s grants/s; a caller waits %s (median), and %s (99 of 100).\n", w.name, rate(w.perSecond()), brief(w.p50), brief(w.p99))
	}
	say("\nWork under the lock adds to each turn: with W of it, a key is granted at most once in W plus the time of a grant above.\n")
	say("A caller waits as long as the callers before it take together. If that is too long, split the key, or lock it in the\n")
	say("transaction that does the work: `LockTx` waits in the server's own queue. [Figures](figures.md) has other locks, longer\n")
	say("holds, and the time from a release to a grant.\n")
	return text.String()
}

// table is what a plot shows, in numbers.
func (p *plot) table() string {
	var text strings.Builder
	fmt.Fprintf(&text, "| %s |", p.of)
	for _, c := range p.curves {
		fmt.Fprintf(&text, " %s, %s |", c.name, p.unit)
	}
	text.WriteString("\n|--:|" + strings.Repeat("--:|", len(p.curves)) + "\n")
	for i, at := range p.curves[0].points {
		fmt.Fprintf(&text, "| %.0f |", at.x)
		for _, c := range p.curves {
			fmt.Fprintf(&text, " %s |", rate(c.points[i].y))
		}
		text.WriteString("\n")
	}
	return text.String()
}
