package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// An task is the first line that a child process reads. The child connects, answers
// with an empty tally, and then answers each order with a tally until its input ends.
type task struct {
	At      string // a URL of PostgreSQL, or the directory of a daemon
	Name    string // what its own keys begin with
	Key     string // the key that all processes want
	Callers int    // the most that an order has
}

// An order is what a crew does at a time.
type order struct {
	Do      string
	Callers int
	Span    time.Duration
	Hold    time.Duration // how long a caller keeps the lock that all want
}

const (
	doPairs   = "pairs"   // acquire and release, a new key each time
	doContend = "contend" // the same with the key that all want
	doAcquire = "acquire" // one acquire of that key, without the release
	doRelease = "release" // the release
)

// A tally is what a child process did.
type tally struct {
	Done    int           // pairs, or grants within the span
	CPU     time.Duration // of doPairs
	Elapsed time.Duration // of doPairs
	At      time.Duration // by sharedClock: when the lock was granted, or its release began
	Waits   string        // the histogram of all waits, those that ended after the span included
}

// An acquirer waits for the lock of a key, and returns what releases it. Callers are
// counted from 0.
type acquirer func(ctx context.Context, caller int, key string) (releaser, error)

type releaser func(context.Context) error

// A member carries out orders. It is what a child process has of one way.
type member struct {
	task
	pair    op       // for doPairs
	acquire acquirer // for the others
	held    releaser // after doAcquire
}

func runChild(ctx context.Context, name string, in io.Reader, out io.Writer) (err error) {
	kind, ok := kinds[name]
	if !ok {
		return fmt.Errorf("unknown kind %q", name)
	}
	orders, answers := json.NewDecoder(in), json.NewEncoder(out)
	var m member
	if err := orders.Decode(&m.task); err != nil {
		return err
	}
	s := newStage(nil, m.Callers)
	defer func() { err = errors.Join(err, s.clear()) }()
	if err := kind.join(ctx, s, &m); err != nil {
		return err
	}
	if err := m.connect(ctx); err != nil {
		return err
	}
	for t := (tally{}); ; {
		if err := answers.Encode(t); err != nil {
			return err
		}
		var o order
		if err := orders.Decode(&o); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if t, err = m.do(ctx, o); err != nil {
			return err
		}
	}
}

// connect has each caller do what needs a connection.
func (m *member) connect(ctx context.Context) error {
	if m.pair != nil {
		w := way{op: m.pair}
		if _, err := w.run(ctx, m.Callers, 0); err != nil {
			return err
		}
	}
	for caller := range m.Callers {
		if m.acquire == nil {
			break
		}
		release, err := m.acquire(ctx, caller, m.Name)
		if err == nil {
			err = release(ctx)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *member) do(ctx context.Context, o order) (t tally, err error) {
	switch o.Do {
	case doPairs:
		begun := time.Now()
		w := way{op: m.pair}
		s, err := w.run(ctx, o.Callers, o.Span)
		return tally{Done: s.all, CPU: s.used.client, Elapsed: time.Since(begun)}, err
	case doContend:
		return m.contend(ctx, o)
	case doAcquire:
		m.held, err = m.acquire(ctx, 0, m.Key)
		return tally{At: sharedClock()}, err
	case doRelease:
		t.At = sharedClock()
		return t, m.held(ctx)
	}
	return t, fmt.Errorf("unknown order %q", o.Do)
}

// contend has callers acquire and release the key that all want. When the span is over,
// each caller still waits for its last turn: a wait that were cut off would count as a
// short one.
func (m *member) contend(ctx context.Context, o order) (t tally, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.Span+stopPatience)
	defer cancel()
	var (
		took = newLatencies(o.Callers)
		errs = make([]error, o.Callers)
		done atomic.Int64
		crew sync.WaitGroup
	)
	turn := func(caller int, over func() bool) error {
		begun := time.Now()
		release, err := m.acquire(ctx, caller, m.Key)
		if err != nil {
			return err
		}
		took.note(caller, 1, time.Since(begun))
		if !over() {
			done.Add(1)
		}
		time.Sleep(o.Hold)
		return release(ctx)
	}
	begun := time.Now()
	over := func() bool { return time.Since(begun) >= o.Span }
	for caller := range o.Callers {
		crew.Go(func() {
			for errs[caller] == nil && !over() {
				errs[caller] = turn(caller, over)
			}
			if errs[caller] != nil {
				cancel()
			}
		})
	}
	crew.Wait()
	if err := errors.Join(append(errs, took.gather())...); err != nil {
		return t, err
	}
	waits, err := took.all.EncodeV2()
	return tally{Done: int(done.Load()), Waits: string(waits)}, err
}

// A childProcess is this program once more.
type childProcess struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	orders  *json.Encoder
	answers *json.Decoder
}

func startChild(ctx context.Context, program, kind string, e task) (c childProcess, err error) {
	c.cmd = exec.CommandContext(ctx, program, "-child", kind)
	c.cmd.Stderr = os.Stderr
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return c, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return c, err
	}
	c.orders, c.answers = json.NewEncoder(c.in), json.NewDecoder(out)
	if err := c.cmd.Start(); err != nil {
		return c, err
	}
	return c, c.orders.Encode(e)
}

// answer is the next one.
func (c childProcess) answer() (t tally, err error) {
	err = c.answers.Decode(&t)
	return t, err
}

// ask waits for the answer to an order.
func (c childProcess) ask(o order) (tally, error) {
	if err := c.orders.Encode(o); err != nil {
		return tally{}, err
	}
	return c.answer()
}

// A crew is a number of child processes of one way.
type crew struct {
	way      string
	children []childProcess // those that connected
	lost     []error        // of those that did not
	server   int            // the process that they ask
	end      func() error
}

// startCrew starts n processes of a way, each with at most so many callers. The crew
// ends with the stage, unless it ends before.
func startCrew(ctx context.Context, s *stage, way string, n, callers int) (*crew, error) {
	at, server, err := kinds[way].place(ctx, s)
	if err != nil {
		return nil, err
	}
	return startCrewAt(ctx, s, way, at, server, n, callers)
}

func startCrewAt(ctx context.Context, s *stage, way, at string, server, n, callers int) (*crew, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &crew{way: way, server: server}
	ctx, cancel := context.WithCancel(ctx)
	var started []childProcess
	c.end = sync.OnceValue(func() error {
		defer cancel()
		patience := time.AfterFunc(stopPatience, cancel)
		defer patience.Stop()
		for _, child := range started {
			_ = child.in.Close()
		}
		var errs []error
		for _, child := range started {
			errs = append(errs, child.cmd.Wait())
		}
		if len(c.lost) > 0 {
			return nil // the errors are known
		}
		return errors.Join(errs...)
	})
	s.cleanup(func() error { return c.end() })
	for i := range n {
		child, err := startChild(ctx, program, way, task{at, fmt.Sprintf("process:%d", i), "hot:" + way, callers})
		if child.cmd.Process == nil {
			return nil, err
		}
		started = append(started, child) // one that failed already does not answer
	}
	for _, child := range started {
		if _, err := child.answer(); err != nil {
			c.lost = append(c.lost, fmt.Errorf("a process of %s did not connect: %w", way, err))
			continue
		}
		c.children = append(c.children, child)
	}
	return c, nil
}

// A response is what a crew did with an order.
type response struct {
	tallies []tally
	server  time.Duration // processor time
}

// do has all processes of the crew carry out an order at once.
func (c *crew) do(o order) (r response, err error) {
	count, err := countUsage(c.server)
	if err != nil {
		return r, err
	}
	for _, child := range c.children {
		if err := child.orders.Encode(o); err != nil {
			return r, err
		}
	}
	for _, child := range c.children {
		t, err := child.answer()
		if err != nil {
			return r, fmt.Errorf("a process of %s: %w", c.way, err)
		}
		r.tallies = append(r.tallies, t)
	}
	used, err := count()
	r.server = used.server
	return r, err
}

// takeTurns has crews take turns with an order, and returns the responses of each.
func takeTurns(crews []*crew, rounds int, o order) (map[string][]response, error) {
	all := make(map[string][]response)
	for i := range rounds {
		for _, c := range inTurn(crews, i) {
			r, err := c.do(o)
			if err != nil {
				return nil, err
			}
			all[c.way] = append(all[c.way], r)
		}
	}
	return all, nil
}

// served is how many operations each process did.
func (r response) served() []int {
	var served []int
	for _, t := range r.tallies {
		served = append(served, t.Done)
	}
	return served
}

func (r response) done() (sum int) {
	for _, n := range r.served() {
		sum += n
	}
	return sum
}

// perSecond is how many pairs all processes did, by the one that took the longest.
func (r response) perSecond() float64 {
	var longest time.Duration
	for _, t := range r.tallies {
		longest = max(longest, t.Elapsed)
	}
	return float64(r.done()) / longest.Seconds()
}

// used is the processor time of all.
func (r response) used() usage {
	sum := usage{server: r.server}
	for _, t := range r.tallies {
		sum.client += t.CPU
	}
	return sum
}

// addWaits adds the waits of all processes to a histogram.
func (r response) addWaits(to *hdrhistogram.Histogram) error {
	for _, t := range r.tallies {
		waits, err := hdrhistogram.Decode([]byte(t.Waits))
		if err != nil {
			return err
		}
		if dropped := to.Merge(waits); dropped > 0 {
			return fmt.Errorf("%d waits took longer than %s", dropped, longestLatency)
		}
	}
	return nil
}
