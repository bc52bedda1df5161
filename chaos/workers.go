package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// workers are the worker processes of a round. A process that is killed is replaced by one of another name.
type workers struct {
	plan     plan
	url, dir string

	mu     sync.Mutex
	living []*worker
	all    []*worker
}

// A worker is a process.
type worker struct {
	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser // its end tells the worker to end
	done  chan struct{}  // closed when the process has ended
	err   error          // how; read it after done
	dead  bool           // it was killed on purpose
}

// order is what a worker is told.
type order struct {
	plan

	Name, URL, Dir string
}

func startWorkers(p plan, url, dir string) (*workers, error) {
	ws := &workers{plan: p, url: url, dir: dir}
	for range p.Workers {
		w, err := ws.start()
		if err != nil {
			return nil, errors.Join(err, ws.killAll())
		}
		ws.living = append(ws.living, w)
	}
	return ws, nil
}

// start starts a process. It is killed when this one ends in any way, even while it is frozen.
func (ws *workers) start() (*worker, error) {
	ws.mu.Lock()
	w := &worker{name: fmt.Sprintf("worker-%d", len(ws.all)+1), done: make(chan struct{})}
	ws.all = append(ws.all, w)
	ws.mu.Unlock()
	text, err := json.Marshal(order{ws.plan, w.name, ws.url, ws.dir})
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	w.cmd = exec.Command(self)
	w.cmd.Env = append(os.Environ(), workerEnv+"="+string(text))
	w.cmd.SysProcAttr = dieWithParent()
	said, err := os.Create(filepath.Join(ws.dir, w.name+".txt"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = said.Close() }() // the process has it
	w.cmd.Stdout, w.cmd.Stderr = said, said
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	started := make(chan error, 1)
	go func() { // the kernel takes the end of a thread for that of the parent: this one lives as long as the process
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := w.cmd.Start()
		started <- err
		if err == nil {
			w.err = w.cmd.Wait()
			close(w.done)
		}
	}()
	return w, <-started
}

// at returns the nth of the living.
func (ws *workers) at(nth int) *worker {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return ws.living[nth]
}

// restart starts a process in the place of a dead one.
func (ws *workers) restart(dead *worker) error {
	w, err := ws.start()
	if err != nil {
		return err
	}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for i, other := range ws.living {
		if other == dead {
			ws.living[i] = w
		}
	}
	return nil
}

func (w *worker) signal(s syscall.Signal) error {
	if err := w.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// kill returns when the process has gone.
func (w *worker) kill() error {
	w.dead = true
	err := w.signal(syscall.SIGKILL)
	<-w.done
	return err
}

func (ws *workers) killAll() error {
	var errs []error
	for _, w := range ws.living {
		errs = append(errs, w.kill())
	}
	return errors.Join(errs...)
}

// end tells all to end, and kills those that do not. The errors say which ended otherwise than they should, and are
// violations: a Close that does not return, or a panic.
func (ws *workers) end(ctx context.Context, within time.Duration) (errs []error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for _, w := range ws.living {
		_ = w.stdin.Close() // it may have ended
	}
	for _, w := range ws.living {
		select {
		case <-w.done:
			if w.err != nil && !w.dead {
				errs = append(errs, fmt.Errorf("%s ended with %w: see %s.txt", w.name, w.err, w.name))
			}
		case <-ctx.Done():
			_ = w.signal(syscall.SIGQUIT) // it says what it waits for
			select {
			case <-w.done:
			case <-time.After(time.Second):
			}
			errs = append(errs, fmt.Errorf("%s did not end within %s: see %s.txt", w.name, within, w.name), w.kill())
		}
	}
	return errs
}

// killed returns the names of those that were killed, and so left what they had.
func (ws *workers) killed() (names []string) {
	for _, w := range ws.all {
		if w.dead {
			names = append(names, w.name)
		}
	}
	return names
}
