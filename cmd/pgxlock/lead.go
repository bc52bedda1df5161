package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/adapters/health"
	"github.com/pgxlock/pgxlock/once"
)

// The command lead runs a command while this process is the leader, as run does under a lock.

// leadTask is what lead is asked to do.
type leadTask struct {
	task
	file, addr string // of the health file and of the handler; empty: none
}

const exampleHealthAddr = "127.0.0.1:8474"

func newLead() *cobra.Command {
	var l leadTask
	cmd := &cobra.Command{
		Use:   "lead KEY [flags] -- COMMAND [ARG...]",
		Short: "Run a command while this process is the leader",
		Long: `Be a candidate for leader, and run a command as long as this process leads: of all
machines that run pgxlock lead with the same key, one has the command running.

If the lock is lost, or pgxlock step-down asks for it, the command and its process
group get SIGTERM, and SIGKILL before anyone else can lead: after --grace, or in time
before the lock expires. Then lead is a candidate again. If the lock is evicted, or its
session ends, the next leader may already run: only fencing keeps the two apart. If the
command ends otherwise, lead exits with its exit code. While no server can be reached,
lead goes on trying.

The command's environment, signals and process group are those of pgxlock run; a new
PGXLOCK_TOKEN for each term. SIGTERM, SIGINT and SIGQUIT are passed on, and end lead when
the command has ended; while it is a candidate, at once.

Standard error says whom lead waits for, when it begins to lead, and when and why it no
longer does. --health-file is there exactly while this process leads, with {"key",
"holder", "token"}. --health-addr answers HTTP requests with 200 while it leads, and with
503 otherwise.`,
		Example: `  pgxlock lead scheduler -- ./scheduler
  pgxlock lead scheduler --ttl 10 --health-addr ` + exampleHealthAddr + ` -- ./scheduler
  pgxlock lead vip --health-file leader.json --metadata 10.0.0.7 -- ./announce`,
		Args:              keyAndCommand,
		ValidArgsFunction: completeCommand,
		RunE: func(cmd *cobra.Command, args []string) error {
			l.read(cmd, args)
			l.logger = slog.New(&complaints{task: &l.task, ofCalls: true})
			return l.do(cmd.Context(), cmd.Flags())
		},
	}
	flags := cmd.Flags()
	l.addFlags(cmd)
	l.kind.addFlag(cmd, "lease or advisory; the server releases an advisory lock when its session ends")
	flags.StringVar(&l.metadata, "metadata", "", "`text` for operators to see, such as the leader's address (leases only)")
	flags.StringVar(&l.file, "health-file", "", "`path` of a file that is there exactly while this process leads")
	flags.StringVar(&l.addr, "health-addr", "", "`address` to answer HTTP requests on, as host:port: 200 while this process leads, 503 otherwise; without a host, 127.0.0.1")
	if err := cmd.MarkFlagFilename("health-file"); err != nil {
		panic("pgxlock: " + err.Error()) // the flag was added a line above
	}
	return cmd
}

// check says what is wrong with the flags.
func (l *leadTask) check(flags *pflag.FlagSet) error {
	if err := refuseEmpty(flags, "none", "health-file", "health-addr"); err != nil {
		return err
	}
	if err := l.checkTimes(flags); err != nil {
		return err
	}
	if l.kind == kindAdvisory && l.metadata != "" {
		return errors.New("--metadata is for leases only; leave out --kind advisory")
	}
	return l.checkLock()
}

// do is a candidate, and a leader, until the command or a signal ends it.
func (l *leadTask) do(ctx context.Context, flags *pflag.FlagSet) error {
	if err := l.check(flags); err != nil {
		return usageError{err}
	}
	return l.withPool(ctx, func(pool *pgxpool.Pool, signals chan os.Signal) error {
		return l.withLocker(pool, func(from *opened) error {
			var file *healthFile
			if l.file != "" {
				var err error
				if file, err = newHealthFile(l.file); err != nil {
					return usageError{fmt.Errorf("--health-file: %w", err)}
				}
			}
			if l.addr != "" {
				server, err := l.listen(ctx, health.Leader(from.locker, l.key))
				if err != nil {
					return usageError{err}
				}
				defer func() { _ = server.Close() }()
			}
			return l.conduct(ctx, signals, func(ctx context.Context, under func(tenure) error) error {
				return l.campaign(ctx, from, file, under)
			})
		})
	})
}

// campaign leads again and again, until the command has ended by itself or a signal came. Lead
// takes the end of a command whose lock could not be renewed for a resignation: the lock may not
// be lost yet. So campaign calls it again.
func (l *leadTask) campaign(ctx context.Context, from *opened, file *healthFile, under func(tenure) error) error {
	ctx, resign := context.WithCancel(ctx)
	defer resign()
	var result error
	decided := false
	stop := l.announcing(ctx, from)
	defer func() { stop() }()
	lead := func(work context.Context, term *pgxlock.Lock) error {
		stop()
		result = file.show(term)
		if result == nil {
			token := ""
			if term.Token() != 0 {
				token = fmt.Sprintf(" with token %d", term.Token())
			}
			l.say("leads for %s%s, as %s", shown(l.key), token, printable(term.Holder()))
			result = under(tenure{lock: term, work: work, env: lockEnvironment(term), health: file})
			file.remove()
			l.say("no longer leads for %s%s", shown(l.key), endOfTerm(result))
		}
		told, again := errors.AsType[endedCommand](result)
		switch {
		case again && told.signal == 0:
			stop = l.announcing(ctx, from)
			return result
		case again:
			result = interrupted(told)
		}
		decided = true
		resign() // also if the lock is lost just now: the command is not started again
		return result
	}
	for {
		err := from.locker.Lead(ctx, l.key, lead, l.options()...)
		if decided {
			return result
		}
		if _, again := errors.AsType[endedCommand](err); !again {
			return err
		}
	}
}

// endOfTerm says why a term ended and what comes next, as far as nothing else says it.
func endOfTerm(result error) string {
	if told, ok := errors.AsType[endedCommand](result); ok && told.signal == 0 {
		return "; a candidate again"
	}
	if end, ok := errors.AsType[commandEnd](result); ok || result == nil {
		return ": " + end.how()
	}
	return ""
}

// listen answers requests.
func (l *leadTask) listen(ctx context.Context, handler http.Handler) (*http.Server, error) {
	host, port, err := net.SplitHostPort(l.addr)
	if err != nil {
		return nil, notAnAddress("health-addr", l.addr, exampleHealthAddr)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	address := net.JoinHostPort(host, port)
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--health-addr %s: %s; choose another address", address, refused(err))
	}
	server := &http.Server{Handler: handler, ReadTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	go func() { _ = server.Serve(listener) }() // until it is closed
	l.say("answering at http://%s/: 200 while this process leads", listener.Addr())
	return server, nil
}

// complaints is a slog.Handler that says warnings and errors as a command does, if they have a
// cause: others were said. Of what is less than a warning it says what has no cause: that
// something works again.
type complaints struct {
	*task
	ofCalls bool           // nothing of locks that are held: the report of renewals and the end of a command say that
	other   *once.Schedule // with which another program starts runs of the key of once; nil: none is known
}

func (c *complaints) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}
func (c *complaints) WithAttrs([]slog.Attr) slog.Handler { return c }
func (c *complaints) WithGroup(string) slog.Handler      { return c }

func (c *complaints) Handle(_ context.Context, r slog.Record) error {
	var cause error
	held := false
	r.Attrs(func(a slog.Attr) bool {
		held = held || a.Key == "leases" || a.Key == "locks"
		if err, ok := a.Value.Any().(error); ok {
			cause = err
		}
		if other, ok := a.Value.Any().(once.Schedule); ok && a.Key == "other" {
			c.other = &other
		}
		return true
	})
	held = held || errors.Is(cause, pgxlock.ErrLost)
	if c.ofCalls && held {
		return nil
	}
	message := strings.TrimPrefix(r.Message, "pgxlock: ")
	switch warning := r.Level >= slog.LevelWarn; {
	case warning && cause != nil && cause.Error() != "":
		c.say("%s: %s", message, describe(c.target.flags, cause))
	case !warning && cause == nil:
		c.say("%s", message)
	}
	return nil
}
