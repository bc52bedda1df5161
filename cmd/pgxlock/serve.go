package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"

	pgxlockprom "github.com/pgxlock/pgxlock/adapters/prometheus"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/serve"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/monitor"
)

// The command serve shows everything in a browser.

const (
	defaultListen = "127.0.0.1:8473"
	tokenVariable = "PGXLOCK_SERVE_TOKEN"

	// shortestToken is how many characters a token has: 128 bits, if they are hexadecimal digits.
	shortestToken = 32

	// mostEvictions is how many evictions are read for the page.
	mostEvictions = 100

	// streamsEnd is how long requests may take to end when the server is stopped.
	streamsEnd = 2 * time.Second
)

// serving is what serve is asked to do.
type serving struct {
	monitoring monitoring
	listen     string
	hosts      []string
	tokenFile  string
	allowEvict bool
	every      time.Duration
}

func newServe() *cobra.Command {
	var s serving
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Show who holds locks and who waits in a browser",
		Long: `Serve a page that shows who holds locks and who waits, who is in whose way, leases that
were left behind, runs that stopped, recent evictions, errors that pgxlock doctor finds,
and the last hour. It is read-only, follows the database, and works without JavaScript.
Open it at http://` + defaultListen + `/.

All viewers share one snapshot each --every; while nobody looks there is one each 30s, for
the history. If the server goes away, the page says what it cannot see, until it is back.

With --allow-evict the page takes locks away from holders, with a reason. That, and any
--listen but a loopback address or a socket, needs a token of at least 32 characters, from
$` + tokenVariable + ` or --token-file; viewers enter it once. There is no TLS: reach the page
of another machine through ssh or a proxy that has it.

/api/snapshot is the same as JSON, as pgxlock watch -o json prints it, with evictions.
/metrics is for Prometheus: what docs/metrics.md lists of the database, with the checks of
pgxlock doctor each 5 minutes, and the process.
/livez answers while the program runs, /readyz while the database does.`,
		Example: `  pgxlock serve
  pgxlock serve --listen 127.0.0.1:8080 --every 5
  pgxlock serve --listen unix:/run/pgxlock/serve.sock
  pgxlock serve --allow-evict --token-file /run/secrets/pgxlock`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd) },
	}
	s.monitoring.addFlags(cmd)
	s.monitoring.addInternalFlag(cmd)
	flags := cmd.Flags()
	flags.StringVar(&s.listen, "listen", defaultListen, "`address` to listen on, as host:port, or unix:/path for a socket of this user alone")
	flags.StringArrayVar(&s.hosts, "host", nil, "host `name` by which browsers may ask, beside localhost and addresses; can be repeated")
	flags.StringVar(&s.tokenFile, "token-file", "", "`file` with the token that viewers need (default $"+tokenVariable+")")
	flags.BoolVar(&s.allowEvict, "allow-evict", false, "let viewers take locks away from holders; needs a token")
	durationVar(flags, &s.every, "every", "", 2*time.Second, "the `duration` between two snapshots while somebody looks")
	return cmd
}

func (s *serving) run(cmd *cobra.Command) error {
	ctx := cmd.Context()
	token, remote, err := s.check(cmd)
	if err != nil {
		return err
	}
	u := reading
	if s.allowEvict {
		u = writing
	}
	pool, all, err := s.monitoring.open(ctx, u)
	if err != nil {
		return err
	}
	defer pool.Close()
	some, err := s.monitoring.of(pool, serve.MostLeases)
	if err != nil {
		return err
	}
	scraped, err := metrics(pool, s.monitoring.target.schema)
	if err != nil {
		return err
	}
	advise := granting(cmd)
	page, err := serve.New(serve.Config{
		Database: databaseOf(pool),
		Locks:    some,
		All:      all,
		Evictions: func(ctx context.Context) ([]serve.Eviction, error) {
			return evictions(ctx, pool, &s.monitoring, mostEvictions, 0)
		},
		Runs: func(ctx context.Context) ([]serve.Run, error) {
			return stoppedRuns(ctx, pool, s.monitoring.target.schema)
		},
		Check: func(ctx context.Context) ([]doctor.Finding, error) {
			return doctor.Check(ctx, pool, &doctor.Config{Schema: s.monitoring.target.schema})
		},
		Ready:    pool.Ping,
		Metrics:  scraped,
		Describe: func(err error) string { return advise(describe(cmd.Flags(), err)) },
		Advise:   func(text string) string { return advise(printable(inFlags(cmd.Flags(), advices, text))) },
		JSON: func(shot monitor.Snapshot, evicted []serve.Eviction, stopped []serve.Run, lost []serve.Loss) any {
			return viewServed(shot, evicted, stopped, lost)
		},
		Token:      token,
		Log:        func(text string) { cmd.PrintErrln("pgxlock:", text) },
		AllowEvict: s.allowEvict,
		Remote:     remote,
		Hosts:      s.hosts,
		Every:      s.every,
	})
	if err != nil {
		return err
	}
	listener, shown, err := listen(ctx, s.listen)
	if err != nil {
		return usageError{fmt.Errorf("--listen %s: %s; choose another address", s.listen, refused(err))}
	}
	mode := "read-only"
	if s.allowEvict {
		mode = "viewers may evict"
	}
	if token != "" {
		mode += ", asks for the token"
	}
	if remote {
		mode += "; other machines reach it without TLS, so that the token can be read on the way"
	}
	cmd.PrintErrf("pgxlock: serving %s (%s)\n", shown, mode)
	return s.serve(ctx, listener, page)
}

// databaseOf names the database of a pool, and its server unless that is a local one.
func databaseOf(pool *pgxpool.Pool) string {
	c := pool.Config().ConnConfig
	name := cmp.Or(c.Database, c.User)
	if network, address := pgconn.NetworkAddress(c.Host, c.Port); network == "tcp" {
		name += " at " + address
	}
	return name
}

// onSocket is what the address of a Unix socket begins with; its path follows.
const onSocket = "unix:"

// listen listens on an address, and returns it as people are told.
func listen(ctx context.Context, address string) (listener net.Listener, shown string, err error) {
	if path, ok := strings.CutPrefix(address, onSocket); ok {
		listener, err = listenUnix(ctx, path)
		return listener, address, err
	}
	listener, err = new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, "", err
	}
	return listener, "http://" + listener.Addr().String() + "/", nil
}

// serve serves until ctx ends.
func (s *serving) serve(ctx context.Context, listener net.Listener, page *serve.Server) error {
	server := &http.Server{
		Handler:           page,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		WriteTimeout:      time.Minute, // streams have a deadline for each event
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		BaseContext:       func(net.Listener) context.Context { return ctx }, // streams end with it
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	go page.Record(ctx)
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), streamsEnd)
	defer cancel()
	if err := server.Shutdown(stop); err != nil {
		_ = server.Close() // what takes longer is cut
	}
	return context.Cause(ctx)
}

// notAnAddress says which addresses a flag takes, of a text that is none.
func notAnAddress(flag, text, example string) error {
	if _, err := strconv.ParseUint(text, 10, 16); err == nil {
		return fmt.Errorf("--%s %q is a port alone; use :%[2]s or 127.0.0.1:%[2]s", flag, text)
	}
	return fmt.Errorf("--%s %q is no address; use host:port, such as %s", flag, text, example)
}

// refused says why an address cannot be listened on.
func refused(err error) string {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Err.Error()
	}
	return err.Error()
}

// check says what is wrong with the flags, and returns the token and whether other machines
// reach the address.
func (s *serving) check(cmd *cobra.Command) (token string, remote bool, err error) {
	if s.every < time.Second {
		return "", false, usageError{fmt.Errorf("--every is %s, it must be at least 1s: each snapshot stops the server's lock table for a moment", s.every)}
	}
	if err := refuseEmpty(cmd.Flags(), "the default", "listen", "host", "token-file"); err != nil {
		return "", false, err
	}
	if path, ok := strings.CutPrefix(s.listen, onSocket); !ok {
		host, _, err := net.SplitHostPort(s.listen)
		if err != nil {
			return "", false, usageError{fmt.Errorf("%w, or unix:/path", notAnAddress("listen", s.listen, defaultListen))}
		}
		address, err := netip.ParseAddr(host)
		remote = host != "localhost" && (err != nil || !address.IsLoopback())
	} else if !filepath.IsAbs(path) { // Linux has names without a file, and so without permissions
		return "", false, usageError{fmt.Errorf("--listen %q is no socket; use unix: and a path that begins with /", s.listen)}
	}
	from := "$" + tokenVariable
	token = os.Getenv(tokenVariable)
	if s.tokenFile != "" {
		from = "--token-file " + s.tokenFile
		text, err := os.ReadFile(s.tokenFile)
		if err != nil {
			return "", false, usageError{fmt.Errorf("--token-file cannot be read: %w", err)}
		}
		token = strings.TrimSpace(string(text))
	}
	const want = "set $" + tokenVariable + " or --token-file, for example to the output of openssl rand -hex 16"
	switch {
	case token == "" && s.tokenFile != "":
		return "", false, usageError{fmt.Errorf("%s is empty; %s", from, want)}
	case token == "" && remote:
		return "", false, usageError{fmt.Errorf("--listen %s lets other machines in, which needs a token; %s", s.listen, want)}
	case token == "" && s.allowEvict:
		return "", false, usageError{fmt.Errorf("--allow-evict needs a token; %s", want)}
	case token != "" && len(token) < shortestToken:
		return "", false, usageError{fmt.Errorf("the token of %s has %d characters, it must have at least %d, so that nobody guesses it; %s", from, len(token), shortestToken, want)}
	}
	return token, remote, nil
}

// metrics answers /metrics with the state of the database and that of the process.
func metrics(pool *pgxpool.Pool, schema string) (http.Handler, error) {
	locks, err := pgxlockprom.NewCollector(pool, &pgxlockprom.CollectorConfig{Schema: schema, Doctor: true})
	if err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	for _, each := range []prometheus.Collector{collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), locks} {
		if err := registry.Register(each); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry}), nil
}

// servedView is what /api/snapshot answers; docs/serve.md lists its fields.
type servedView struct {
	snapshotView
	Evictions []evictionView   `json:"evictions"`
	Runs      []stoppedRunView `json:"runs"`
	Lost      []lossView       `json:"lost"`
}

// stoppedRunView is what the page knows of a run: the fields of runs that tell of its end.
type stoppedRunView struct {
	Key     string    `json:"key"`
	Slot    time.Time `json:"slot"`
	State   string    `json:"state"`
	Holder  string    `json:"holder"`
	Started time.Time `json:"started_at"`
	Error   string    `json:"error,omitempty"`
}

type lossView struct {
	holderView
	Next string `json:"taken_over_by,omitempty"`
}

func viewServed(shot monitor.Snapshot, evicted []serve.Eviction, stopped []serve.Run, lost []serve.Loss) servedView {
	view := viewSnapshot(shot)
	if evicted == nil {
		view.Unread = append(view.Unread, "evictions")
	}
	if stopped == nil {
		view.Unread = append(view.Unread, "runs")
	}
	return servedView{
		view,
		views(evicted, viewEviction),
		views(stopped, func(r serve.Run) stoppedRunView {
			return stoppedRunView{r.Key, r.Slot, string(r.State), r.Holder, r.Started, r.Error}
		}),
		views(lost, func(l serve.Loss) lossView { return lossView{viewHolder(l.Holder), l.Next} }),
	}
}
