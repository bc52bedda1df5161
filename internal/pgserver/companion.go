// Companions are programs that run beside a server. They must not outlive this process either.

package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Companion is a program that runs beside a server, as the server's user, in a
// directory of its own within the server's. It ends with this process, as the
// server does.
type Companion struct {
	server  *Server
	dir     string
	process *process
	log     *tail
	quit    syscall.Signal // ends it without waiting for its clients
}

// Companion starts a program with the arguments that args returns for its
// directory, and waits until ready returns nil. Stop it before the server.
func (s *Server) Companion(ctx context.Context, program string, args func(dir string) []string, ready func(ctx context.Context, dir string) error) (*Companion, error) {
	c, err := s.newCompanion()
	if err != nil {
		return nil, fmt.Errorf("pgserver: %s: %w", filepath.Base(program), err)
	}
	err = c.start(ctx, func(ctx context.Context) error { return ready(ctx, c.dir) }, program, args(c.dir)...)
	if err != nil {
		return nil, fmt.Errorf("pgserver: %w", err)
	}
	return c, nil
}

// write writes a file that the program reads.
func (c *Companion) write(name, text string) error {
	return errors.Join(os.WriteFile(c.file(name), []byte(text), 0o600), c.server.as.own(c.file(name)))
}

func (c *Companion) file(name string) string { return filepath.Join(c.dir, name) }

// newCompanion makes the directory.
func (s *Server) newCompanion() (*Companion, error) {
	dir, err := os.MkdirTemp(s.dir.path, "p")
	if err != nil {
		return nil, err
	}
	return &Companion{server: s, dir: dir, log: &tail{}, quit: syscall.SIGTERM}, nil
}

// start starts the program and waits until it is ready. If it fails, nothing is
// left of it.
func (c *Companion) start(ctx context.Context, ready func(context.Context) error, program string, args ...string) error {
	err := c.launch(program, args...)
	if err == nil {
		err = c.await(ctx, ready)
	}
	if err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		return fmt.Errorf("%s: %w%s", filepath.Base(program), errors.Join(err, c.Stop(ctx)), quoted(c.log.String()))
	}
	return nil
}

func (c *Companion) launch(program string, args ...string) error {
	if err := c.server.as.own(c.dir); err != nil {
		return err
	}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = c.log, c.log
	cmd.ExtraFiles = []*os.File{c.server.dir.lock} // see removeStale
	prepare(cmd, c.dir, c.server.as, c.quit)
	var err error
	c.process, err = startProcess(cmd, nil)
	return err
}

func (c *Companion) await(ctx context.Context, ready func(context.Context) error) error {
	for {
		attempt, cancel := context.WithTimeout(ctx, time.Second)
		err := ready(attempt)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-c.process.done:
			return fmt.Errorf("it ended: %w", errors.Join(c.process.err, err))
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(pollInterval):
		}
	}
}

// Stop ends the program, by force when ctx is done, and removes its directory.
func (c *Companion) Stop(ctx context.Context) error {
	if err := errors.Join(c.end(ctx), os.RemoveAll(c.dir)); err != nil {
		return fmt.Errorf("pgserver: stop: %w", err)
	}
	return nil
}

func (c *Companion) end(ctx context.Context) error {
	if c.process == nil {
		return nil
	}
	if err := c.process.signal(c.quit); err != nil {
		return err
	}
	if err := c.process.wait(ctx); err == nil {
		return nil
	}
	err := c.process.signal(syscall.SIGKILL)
	<-c.process.done
	return err
}

// PID returns the process id of the program.
func (c *Companion) PID() int { return c.process.cmd.Process.Pid }

// LogTail returns the last lines of the program's log.
func (c *Companion) LogTail() string { return c.log.String() }
