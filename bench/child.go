package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// An errand is what a child process gets on its input. It connects, answers "ready",
// waits for another line, so that all children begin together, and answers with a tally.
type errand struct {
	URL     string
	Name    string // what its keys begin with
	Callers int
	Span    time.Duration
}

// A tally is what a child process did.
type tally struct {
	Pairs    int
	Each     time.Duration // as a caller sees it
	CPU      time.Duration
	Elapsed  time.Duration
	Children int // how many tallies this one sums up
}

// childKinds are the Lockers that children make.
var childKinds = map[string]lockerOf{
	"lease":    leaseWith(nil),
	"advisory": func(pool *pgxpool.Pool) (*pgxlock.Locker, error) { return pgxlock.NewAdvisoryLocker(pool, nil) },
}

func runChild(ctx context.Context, kind string, in io.Reader, out io.Writer) (err error) {
	newLocker := childKinds[kind]
	if newLocker == nil {
		return fmt.Errorf("unknown kind %q", kind)
	}
	lines := bufio.NewReader(in)
	line, err := lines.ReadBytes('\n')
	if err != nil {
		return err
	}
	var e errand
	if err := json.Unmarshal(line, &e); err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, e.URL)
	if err != nil {
		return err
	}
	defer pool.Close()
	locks, err := newLocker(pool)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, locks.Close(ctx)) }()
	w := way{name: kind, op: pairUnder(locks, e.Name)}
	if _, err := w.run(ctx, e.Callers, 0); err != nil { // connects
		return err
	}
	if _, err := fmt.Fprintln(out, "ready"); err != nil {
		return err
	}
	if _, err := lines.ReadBytes('\n'); err != nil {
		return err
	}
	begun := time.Now()
	s, err := w.run(ctx, e.Callers, e.Span)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(tally{s.all, s.cost(), s.used.client, time.Since(begun), 1})
}

// A childProcess is this program once more.
type childProcess struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func startChild(ctx context.Context, program, kind string, e errand) (c childProcess, err error) {
	c.cmd = exec.CommandContext(ctx, program, "-child", kind)
	c.cmd.Stderr = os.Stderr
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return c, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return c, err
	}
	c.out = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		return c, err
	}
	return c, json.NewEncoder(c.in).Encode(e)
}

// crowd runs so many children at once, and sums up what they did.
func crowd(ctx context.Context, program, kind, url string, n, callers int, span time.Duration) (sum tally, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var children []childProcess
	defer func() {
		if err != nil {
			cancel() // a child that waits for its line is ended
		}
		for _, c := range children {
			_ = c.in.Close()
			if errWait := c.cmd.Wait(); err == nil {
				err = errWait
			}
		}
		cancel()
	}()
	for i := range n {
		c, err := startChild(ctx, program, kind, errand{url, fmt.Sprintf("process:%d", i), callers, span})
		if c.cmd.Process != nil {
			children = append(children, c)
		}
		if err != nil {
			return sum, err
		}
	}
	for _, c := range children {
		if line, err := c.out.ReadString('\n'); line != "ready\n" {
			return sum, fmt.Errorf("a child says %q: %w", line, err)
		}
	}
	for _, c := range children {
		if _, err := io.WriteString(c.in, "go\n"); err != nil {
			return sum, err
		}
	}
	for _, c := range children {
		var t tally
		if err := json.NewDecoder(c.out).Decode(&t); err != nil {
			return sum, err
		}
		sum.Pairs += t.Pairs
		sum.CPU += t.CPU
		sum.Each += t.Each / time.Duration(n)
		sum.Elapsed = max(sum.Elapsed, t.Elapsed)
		sum.Children += t.Children
	}
	return sum, nil
}
