package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"time"
)

// reportPatience is how long one report may take. It turns a hang into a message.
const reportPatience = 5 * time.Minute

// A team is the worker processes of a demonstration. They report through one
// pipe, so that what happened first is heard first.
type team struct {
	workers []*workerProcess
	reports chan report
	done    chan struct{} // closed by stop
}

// workerProcess is a worker as seen from outside.
type workerProcess struct {
	name   string
	cmd    *exec.Cmd
	orders *json.Encoder // a worker whose orders end goes away, also when we were killed
	ours   atomic.Bool   // its end is our doing
	ended  chan struct{}
}

// startTeam starts this program once for each name.
func startTeam(url string, names ...string) (*team, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	t := &team{reports: make(chan report), done: make(chan struct{})}
	go t.read(r)
	defer func() { _ = w.Close() }() // the workers have it
	for _, name := range names {
		cmd := exec.Command(program, "worker", name, url)
		cmd.Stdout, cmd.Stderr = w, os.Stderr
		apart(cmd)
		if err := t.start(name, cmd); err != nil {
			t.stop()
			return nil, err
		}
	}
	return t, nil
}

// start starts a worker on a thread that waits for it. Linux kills the worker when
// the thread that started it ends, which the Go runtime may do to any other thread.
func (t *team) start(name string, cmd *exec.Cmd) error {
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	p := &workerProcess{name: name, cmd: cmd, orders: json.NewEncoder(stdin), ended: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		err = cmd.Wait()
		close(p.ended)
		if !p.ours.Load() {
			t.deliver(report{Worker: name, Err: fmt.Sprintf("its process ended: %v", err)})
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	t.workers = append(t.workers, p)
	return nil
}

// read hands on what the workers say until the last of them has ended.
func (t *team) read(r io.ReadCloser) {
	defer func() { _ = r.Close() }()
	for decoder := json.NewDecoder(r); ; {
		var got report
		if decoder.Decode(&got) != nil {
			return
		}
		t.deliver(got)
	}
}

func (t *team) deliver(r report) {
	select {
	case t.reports <- r:
	case <-t.done:
	}
}

// next returns the next report.
func (t *team) next(ctx context.Context) (report, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, reportPatience, fmt.Errorf("the workers said nothing for %s", reportPatience))
	defer cancel()
	select {
	case r := <-t.reports:
		if r.Did == "" {
			return r, fmt.Errorf("%s: %s", r.Worker, r.Err)
		}
		return r, nil
	case <-ctx.Done():
		return report{}, context.Cause(ctx)
	}
}

// answer returns the report of the one worker that has an order.
func (t *team) answer(ctx context.Context, p *workerProcess, did string) (report, error) {
	r, err := t.next(ctx)
	if err == nil && (r.Worker != p.name || r.Did != did) {
		err = fmt.Errorf("%s reported %q, when %s was to report %q", r.Worker, r.Did, p.name, did)
	}
	return r, err
}

// ask gives an order and waits for the answer.
func (t *team) ask(ctx context.Context, p *workerProcess, o order) (report, error) {
	if err := p.tell(o); err != nil {
		return report{}, err
	}
	return t.answer(ctx, p, o.Do)
}

// must is ask for an order that has to succeed.
func (t *team) must(ctx context.Context, p *workerProcess, o order) (report, error) {
	r, err := t.ask(ctx, p, o)
	if err == nil {
		err = r.failure()
	}
	return r, err
}

// failure is the error that a worker reported.
func (r report) failure() error {
	if r.Err == "" {
		return nil
	}
	return fmt.Errorf("%s: %s: %s", r.Worker, r.Did, r.Err)
}

// tell gives an order.
func (p *workerProcess) tell(o order) error { return p.orders.Encode(o) }

// kill ends the worker without giving it a chance to do anything about it.
func (p *workerProcess) kill() {
	p.ours.Store(true)
	_ = p.cmd.Process.Kill() // fails only if it has ended already
	<-p.ended
}

// stop ends all workers, frozen ones as well.
func (t *team) stop() {
	close(t.done)
	for _, p := range t.workers {
		p.kill()
	}
}
