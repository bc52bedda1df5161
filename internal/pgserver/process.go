// Programs that must not outlive this process are started here, and waited for.

package pgserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// process is a program that was started.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the program and every process that inherited its output are gone
	err  error         // how it ended; read it after done
}

// startProcess starts cmd on a thread of its own, in the network if it is not nil.
//
// The kernel sends a child its parent-death signal when the *thread* that
// started it ends, not the process. Go ends a thread when a goroutine that is
// locked to it returns, so a server started by such a caller would be shot in
// the middle of the run. Here the thread that starts the child also waits for
// it, and nothing else runs on it, so it ends only with the whole process.
func startProcess(cmd *exec.Cmd, network *Network) (*process, error) {
	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		var err error
		if network == nil {
			defer runtime.UnlockOSThread()
		} else {
			err = network.Enter() // the thread ends with us: nothing else may run in there
		}
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// signal sends a signal to the process itself.
func (p *process) signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// signalAll sends a signal to the process and then to its children. A child
// that it forks meanwhile may be missed.
func (p *process) signalAll(sig os.Signal) error {
	if !p.running() {
		return nil // its number may be another process's by now
	}
	pids := children(p.cmd.Process.Pid) // before the signal: an orphan has another parent
	if err := p.signal(sig); err != nil {
		return err
	}
	for _, pid := range pids {
		child, err := os.FindProcess(pid)
		if err != nil {
			continue // gone
		}
		if err := child.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
	}
	return nil
}

// wait waits until the process and its children are gone, or ctx is done.
func (p *process) wait(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// running says whether the process or a child of it is still there.
func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// run runs one of PostgreSQL's tools to its end in the directory dir as the
// given account. Its output is in the error.
func run(ctx context.Context, dir string, as *account, tool string, args ...string) error {
	cmd := exec.CommandContext(ctx, tool, args...)
	cmd.WaitDelay = time.Second // a child of the tool may hold its output open after we kill the tool
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	prepare(cmd, dir, as, syscall.SIGKILL)
	p, err := startProcess(cmd, nil)
	if err != nil {
		return err
	}
	<-p.done
	if p.err != nil {
		return fmt.Errorf("%s: %w%s", filepath.Base(tool), errors.Join(context.Cause(ctx), p.err), quoted(output.String()))
	}
	return nil
}

// prepare sets what all our programs have in common. orphaned is the signal
// that the program gets when we die, where the system can do that.
func prepare(cmd *exec.Cmd, dir string, as *account, orphaned syscall.Signal) {
	cmd.Dir = dir // ours may be closed to the account
	cmd.Env = environment()
	cmd.SysProcAttr = sysProcAttr(as, orphaned)
}

// environment is ours without libpq's variables, which may name a production
// server, and with messages in English.
func environment() []string {
	env := []string{"LC_ALL=C"}
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "PG") && !strings.HasPrefix(entry, "LC_") {
			env = append(env, entry)
		}
	}
	return env
}

// quoted sets a program's output apart in an error text.
func quoted(output string) string {
	output = strings.TrimSpace(output)
	if output == "" {
		return ""
	}
	return "\n\t" + strings.ReplaceAll(output, "\n", "\n\t")
}
