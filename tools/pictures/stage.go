package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// bin/with --throw-away names its server in the first two variables. The third one names tmux.
const (
	databaseEnv = "PGXLOCK_DEMO_DATABASE"
	serverEnv   = "PGXLOCK_DEMO_SERVER"
	tmuxEnv     = "PGXLOCK_TEST_TMUX"
)

// A stage is an empty database, and the processes that make it a busy one. Each process sees
// a host name of its own, so that no picture has the name of this machine.
type stage struct {
	url, server string
	bin         string // where pgxlock and demo are
	home        string
	env         []string

	ctx     context.Context
	started []*exec.Cmd
	screens int
}

const patience = 30 * time.Second

// captured returns the pictures of commands that run in a terminal, by their file names.
func captured(root string) (map[string]*canvas, error) {
	s := &stage{url: os.Getenv(databaseEnv)}
	if s.url == "" {
		return nil, errors.New("there is no throw-away server: run it as make pictures does")
	}
	s.server, _, _ = strings.Cut(os.Getenv(serverEnv), " from ")
	var err error
	if s.bin, err = filepath.Abs(filepath.Join(root, "bin")); err != nil {
		return nil, err
	}
	if s.home, err = os.MkdirTemp("", "pictures"); err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(s.home) }()
	s.env = []string{
		"PATH=" + s.bin + ":" + os.Getenv("PATH"), "HOME=" + s.home, "SHELL=/bin/sh", "LC_ALL=C.UTF-8", "TZ=UTC", "HISTFILE=",
		`PS1=\[\e[32m\]$\[\e[0m\] `, "DATABASE_URL=" + s.url, databaseEnv + "=" + s.url, serverEnv + "=" + s.server,
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	s.ctx = ctx
	defer func() {
		cancel()
		for _, cmd := range s.started {
			_ = cmd.Wait() // it was ended
		}
	}()

	pictures := make(map[string]*canvas)
	add := func(name string, columns int, title, desc string, play func(*screen) step) step {
		return func() error {
			shown, err := s.play(columns, play)
			if err == nil {
				pictures[name], err = terminal(shown, columns, title, desc)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		}
	}
	return pictures, inTurn(
		add("demo.svg", 130, "make demo, in a terminal", "Worker processes compete for a lease; one is killed and one freezes; SQL callers and Go callers exclude each other. Each part ends with the claims that were checked.",
			func(on *screen) step { return on.runs("demo") }),
		s.does("ops-1", "migrate", "down", "--force"),
		s.busy,
		add("watch.svg", 114, "pgxlock watch, in a terminal", "Two tables: who waits for which lock, how long, and who holds it; and all holders, with state, time, token and note.",
			func(on *screen) step {
				return func() error { return inTurn(on.types("pgxlock watch --name schema"), on.until("psql:alice")) }
			}),
		add("tree.svg", 100, "pgxlock tree, in a terminal", "For each lock that somebody waits for: who holds it, and below who waits, with the locks that a waiter itself holds.",
			func(on *screen) step { return on.runs("pgxlock tree --name schema") }),
		add("run.svg", 100, "pgxlock run, in a terminal", "A command is not run while another machine has the lock, exit code 75; the next one waits for the lock, and runs; the third is ended when the lock is lost, exit code 80.",
			s.underLocks),
	)
}

// busy fills the database: leases and advisory locks of commands and of SQL callers, their
// waiters, and a lease whose holder is gone.
func (s *stage) busy() error {
	session := "SELECT pg_advisory_lock(advisory_lock_key('schema')); SELECT pg_advisory_lock(advisory_lock_key('catalogue'));"
	sleeps := []string{"--", "sleep", "600"}
	return inTurn(
		s.does("ops-1", "migrate", "up"),
		s.does("import-1", "acquire", "import:csv", "--holder", "import-1", "--ttl", "1s", "--metadata", "part 3 of 8"),
		s.does("billing-1", "acquire", "invoice:42", "--holder", "billing-1", "--ttl", "1m", "--metadata", "order 7741"),
		s.does("report-1", "acquire", "report:daily", "--holder", "report-1", "--ttl", "10m"),
		s.psql("psql", "SELECT acquire_lock('cron:cleanup', 'psql:alice', 300)").Run,
		s.starts(s.pgxlock("search-1", append([]string{"run", "catalogue", "--kind", "advisory", "--shared"}, sleeps...)...)),
		s.starts(s.pgxlock("search-2", append([]string{"run", "catalogue", "--kind", "advisory", "--shared"}, sleeps...)...)),
		s.starts(s.pgxlock("report-2", append([]string{"run", "report:daily"}, sleeps...)...)),
		s.until("search-1:", "search-2:"),
		s.starts(s.psql("migrator", session)),
		s.until("migrator:"),
		s.starts(s.pgxlock("web-1", append([]string{"run", "schema", "--kind", "advisory"}, sleeps...)...)),
		s.starts(s.pgxlock("billing-2", append([]string{"run", "invoice:42"}, sleeps...)...)),
		s.until("billing-2:"),
		s.starts(s.pgxlock("billing-3", append([]string{"run", "invoice:42"}, sleeps...)...)),
		s.until("web-1:", "billing-3:", "report-2:", "catalogue"), // the name of an advisory lock is published when it has been held for 2 s
	)
}

// underLocks shows how pgxlock run fails at once, waits, and loses its lock.
func (s *stage) underLocks(on *screen) step {
	const script = "#!/bin/sh\necho \"backup begins: key $PGXLOCK_KEY, token $PGXLOCK_TOKEN\"\nsleep \"${1:-1}\"\necho 'backup is done'\n"
	return func() error {
		return inTurn(
			func() error { return os.WriteFile(filepath.Join(s.home, "backup.sh"), []byte(script), 0o755) },
			s.does("worker-2", "acquire", "nightly", "--holder", "worker-2", "--ttl", "10m"),
			on.runs("pgxlock run nightly --no-wait -- ./backup.sh"),
			on.runs("echo $?"),
			on.types("pgxlock run nightly --wait 1m -- ./backup.sh"),
			on.until(`waiting for "nightly", held by worker-2`),
			s.psql("worker-2", "SELECT release_lock('nightly', 'worker-2')").Run,
			on.until(`backup is done\n.*\$ *$`),
			on.types("pgxlock run nightly -- ./backup.sh 3600"),
			on.until(`(?s)done.*backup begins[^\n]*$`),
			s.does("ops-1", "evict", "nightly", "--reason", "maintenance", "--yes"),
			on.until(`\n\$ *$`),
			on.runs("echo $?"),
		)
	}
}

// command returns a command that sees that host name.
func (s *stage) command(host, program string, args ...string) *exec.Cmd {
	unshare := []string{"--uts"}
	if os.Geteuid() != 0 {
		unshare = append(unshare, "--map-root-user")
	}
	cmd := exec.CommandContext(s.ctx, "unshare", slices.Concat(unshare, []string{"sh", "-c", `hostname "$0" && exec "$@"`, host, program}, args)...)
	cmd.Dir, cmd.Stderr, cmd.Env = s.home, os.Stderr, s.env
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = patience
	return cmd
}

// pgxlock's sessions are named after their hosts.
func (s *stage) pgxlock(host string, args ...string) *exec.Cmd {
	cmd := s.command(host, filepath.Join(s.bin, "pgxlock"), args...)
	cmd.Env = append(slices.Clone(s.env), "PGAPPNAME="+host)
	return cmd
}

func (s *stage) psql(application, statements string) *exec.Cmd {
	cmd := s.command(application, "psql", "-qd", s.url)
	cmd.Env = append(slices.Clone(s.env), "PGAPPNAME="+application)
	cmd.Stdin = strings.NewReader(statements)
	return cmd
}

// A step is a part of a play.
type step func() error

// inTurn takes one step after the other until one fails.
func inTurn(steps ...step) error {
	for _, next := range steps {
		if err := next(); err != nil {
			return err
		}
	}
	return nil
}

func (s *stage) does(host string, args ...string) step {
	return func() error {
		if err := s.pgxlock(host, args...).Run(); err != nil {
			return fmt.Errorf("pgxlock %s: %w", strings.Join(args, " "), err)
		}
		return nil
	}
}

func (s *stage) starts(cmd *exec.Cmd) step {
	return func() error {
		cmd.Stderr = nil // it says so when we end it
		err := cmd.Start()
		if err == nil {
			s.started = append(s.started, cmd)
		}
		return err
	}
}

// until waits until watch shows all of these.
func (s *stage) until(names ...string) step {
	return func() error { return s.wait(names) }
}

func (s *stage) wait(names []string) error {
	for deadline := time.Now().Add(patience); ; {
		ctx, cancel := context.WithCancel(s.ctx)
		cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "pgxlock"), "watch")
		cmd.Env = s.env
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			cancel()
			return err
		}
		shot := make([]byte, 1<<16)
		n, _ := out.Read(shot) // a snapshot is written at once
		cancel()
		_ = cmd.Wait() // it was ended
		seen := string(shot[:n])
		missing := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return strings.Contains(seen, name) })
		if len(missing) == 0 {
			return nil
		}
		if time.Now().After(deadline) || s.ctx.Err() != nil {
			return fmt.Errorf("%s: not there after %s:\n%s", strings.Join(missing, ", "), patience, seen)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// A screen is a tmux of its own, which runs bash.
type screen struct {
	program, socket string
	env             []string
}

// play shows what is on a screen in the end.
func (s *stage) play(columns int, act func(*screen) step) (shown string, err error) {
	s.screens++
	on := &screen{program: os.Getenv(tmuxEnv), socket: filepath.Join(s.home, fmt.Sprint("tmux", s.screens)), env: s.env} // the last one may still be ending
	if on.program == "" {
		on.program = "tmux"
	}
	// A client in control mode needs no terminal, and the server ends with it.
	args := strings.Split(fmt.Sprint("-u -C -f /dev/null -S ", on.socket,
		" start-server ; set -g default-terminal screen ; set -g status off ; set -g destroy-unattached on",
		" ; new-session -x ", columns, " -y 70 bash --norc --noprofile --noediting"), " ")
	client := s.command("worker-1", on.program, args...)
	keys, err := client.StdinPipe()
	if err != nil {
		return "", err
	}
	if err := client.Start(); err != nil {
		return "", err
	}
	defer func() {
		err = errors.Join(err, keys.Close())
		_ = client.Wait() // it has no more to say
	}()
	if err := inTurn(on.until(`^\$ *$`), act(on)); err != nil {
		return "", err
	}
	return on.tmux("capture-pane", "-pe")
}

func (on *screen) tmux(args ...string) (string, error) {
	var out bytes.Buffer
	cmd := exec.Command(on.program, append([]string{"-u", "-S", on.socket}, args...)...)
	cmd.Stdout, cmd.Stderr, cmd.Env = &out, io.Discard, on.env
	err := cmd.Run()
	return out.String(), err
}

// types types a line.
func (on *screen) types(line string) step {
	return func() error {
		_, err := on.tmux("send-keys", "-l", "--", line)
		if err == nil {
			_, err = on.tmux("send-keys", "Enter")
		}
		return err
	}
}

// runs types a line, and waits until the next may be typed.
func (on *screen) runs(line string) step { return on.shows(line, `\n\$ *$`) }

// shows types a line, and waits for what follows it.
func (on *screen) shows(line, pattern string) step {
	return func() error { return inTurn(on.types(line), on.until(regexp.QuoteMeta(line)+`(?s:.*)`+pattern)) }
}

// until waits for what is on the screen.
func (on *screen) until(pattern string) step {
	wanted := regexp.MustCompile(pattern)
	return func() error {
		for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
			seen, err := on.tmux("capture-pane", "-p")
			var lines []string
			for line := range strings.Lines(seen) {
				lines = append(lines, strings.TrimRight(line, " \n"))
			}
			seen = strings.TrimRight(strings.Join(lines, "\n"), "\n")
			switch {
			case err == nil && wanted.MatchString(seen):
				return nil
			case time.Now().After(deadline):
				return errors.Join(fmt.Errorf("the screen does not show %s after %s:\n%s", pattern, patience, seen), err)
			}
		}
	}
}
