package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/cutnet"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/migrations"
)

//go:embed sql/prepare.sql
var prepareSQL string

//go:embed sql/harden.sql
var hardenSQL string

//go:embed sql/timeouts.sql
var timeoutsSQL string

//go:embed sql/reload.sql
var reloadSQL string

//go:embed sql/synchronous.sql
var synchronousSQL string

// appRole is the role of an application. It has what docs/rights.md says, and no more.
const appRole = "chaos_app"

// faketimeEnv names the library with which a server's clock can be set.
const faketimeEnv = "PGXLOCK_TEST_FAKETIME"

// A stage is where a round takes place: a server, perhaps a standby and a pooler, and a relay before each server.
type stage struct {
	plan     plan
	clusters *pgserver.Clusters

	mu      sync.Mutex // held while servers end, start or change their roles
	primary *pgserver.Server
	standby *pgserver.Server

	pool   atomic.Pointer[pgxpool.Pool] // of the superuser, at the primary, past the relay
	pooler *pgserver.Pooler
	relays []*cutnet.Relay // before the primary and, if there is one, the standby
	clock  string          // the file that sets the server's clock

	late atomic.Int64  // how long each message is delayed, in ns
	lose atomic.Uint32 // of a thousand answers so many are lost
}

// missing says what this machine lacks for a fault, or returns an empty string.
func missing(fault string) string {
	switch fault {
	case "pooler":
		if _, err := pgserver.FindPoolers(); err != nil {
			return err.Error()
		}
	case "clock":
		if os.Getenv(faketimeEnv) == "" {
			return faketimeEnv + " names no libfaketime; scripts/faketime-tree gets it from Debian's package"
		}
	}
	return ""
}

// openStage prepares the stage of a round.
func openStage(ctx context.Context, p plan, clusters *pgserver.Clusters) (*stage, error) {
	s := &stage{plan: p, clusters: clusters}
	if err := s.open(ctx); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *stage) open(ctx context.Context) (err error) {
	cfg := pgserver.Config{Clusters: s.clusters, Settings: map[string]string{
		"max_connections": "60", "max_locks_per_transaction": "32", "shared_buffers": "16MB",
	}}
	if s.plan.has("clock") {
		if err := s.makeClock(); err != nil {
			return err
		}
		cfg.Env = []string{"LD_PRELOAD=" + os.Getenv(faketimeEnv), "FAKETIME_TIMESTAMP_FILE=" + s.clock, "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1"}
	}
	if s.primary, err = pgserver.Start(ctx, cfg); err != nil {
		return err
	}
	if err := s.connectAdmin(ctx); err != nil {
		return err
	}
	if err := s.prepareDatabase(ctx); err != nil {
		return err
	}
	if err := s.openRelay(s.primary.URL("postgres")); err != nil {
		return err
	}
	if s.plan.has("promote") {
		if err := s.makeStandby(ctx); err != nil {
			return err
		}
	}
	if s.plan.has("pooler") {
		return s.startPooler(ctx)
	}
	return nil
}

// connectAdmin makes the superuser's pool one at the primary.
func (s *stage) connectAdmin(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, s.primary.URL("postgres")+"&pool_max_conns=3&application_name=chaos")
	if err != nil {
		return err
	}
	if old := s.pool.Swap(pool); old != nil {
		old.Close()
	}
	return nil
}

func (s *stage) admin() *pgxpool.Pool { return s.pool.Load() }

// prepareDatabase installs pgxlock and gives the workers' role its rights.
func (s *stage) prepareDatabase(ctx context.Context) error {
	if err := migrations.Up(ctx, s.admin(), nil); err != nil {
		return err
	}
	statements := []string{prepareSQL}
	if s.plan.Role == roleHardened {
		statements = append(statements, hardenSQL)
	}
	if s.plan.has("timeouts") {
		statements = append(statements, timeoutsSQL)
	}
	return s.exec(ctx, statements...)
}

// exec runs statements of the superuser. Several in one text are one transaction.
func (s *stage) exec(ctx context.Context, statements ...string) error {
	return s.admin().AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		for _, sql := range statements {
			if _, err := conn.Conn().PgConn().Exec(ctx, sql).ReadAll(); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *stage) makeStandby(ctx context.Context) (err error) {
	if s.standby, err = s.primary.Standby(ctx, pgserver.Config{Clusters: s.clusters}); err != nil {
		return err
	}
	if !s.plan.Async {
		if err := s.exec(ctx, synchronousSQL, reloadSQL); err != nil {
			return err
		}
	}
	return s.openRelay(s.standby.URL("postgres"))
}

// startPooler puts a PgBouncer between the relay and the server.
func (s *stage) startPooler(ctx context.Context) error {
	programs, err := pgserver.FindPoolers()
	if err != nil {
		return err
	}
	s.pooler, err = s.primary.Pooler(ctx, programs[len(programs)-1], map[string]string{
		"pool_mode": s.plan.PoolMode, "default_pool_size": "40", "auth_user": pgserver.Superuser,
		"server_login_retry": "1", // 15 s by default: after a crash workers could not release what they have before they end
	})
	if err != nil {
		return err
	}
	s.relays[0].Close()
	s.relays = s.relays[1:]
	if err := s.openRelay(s.pooler.URL("postgres")); err != nil {
		return err
	}
	if last := len(s.relays) - 1; last > 0 {
		s.relays[0], s.relays[last] = s.relays[last], s.relays[0]
	}
	return nil
}

// openRelay puts a relay before a server.
func (s *stage) openRelay(url string) error {
	config, err := pgconn.ParseConfig(url)
	if err != nil {
		return err
	}
	_, address := pgconn.NetworkAddress(config.Host, config.Port)
	relay, err := cutnet.OpenRelay(cutnet.RelayConfig{Server: address, Request: s.request, Answer: s.answer})
	if err == nil {
		s.relays = append(s.relays, relay)
	}
	return err
}

// request delays what a worker sends.
func (s *stage) request([]byte) { time.Sleep(time.Duration(s.late.Load())) }

// answer delays what the server sends, and says whether it arrives. What may be lost is the last message of the
// answer to a statement, or to several: then the server has committed, and its client cannot know.
func (s *stage) answer(message []byte) bool {
	if late := s.late.Load(); late > 0 {
		time.Sleep(time.Duration(rand.Int64N(late)))
	}
	const readyForQuery, idle = 'Z', 'I'
	last := message[0] == readyForQuery && message[len(message)-1] == idle
	return !last || rand.Uint32N(1000) >= s.lose.Load()
}

// url is where workers connect: to the relays.
func (s *stage) url() string {
	u := url.URL{Scheme: "postgres", User: url.User(appRole), Path: "/postgres"}
	if s.plan.Role == roleOwner {
		u.User = url.User(pgserver.Superuser)
	}
	q := url.Values{"sslmode": {"disable"}, "connect_timeout": {"2"}}
	for i, relay := range s.relays {
		if i > 0 {
			u.Host += ","
			q.Set("target_session_attrs", "read-write")
		}
		u.Host += relay.Address()
	}
	u.RawQuery = q.Encode()
	return u.String()
}

// connect connects past the relay as a role of its own, which leaves the superuser's connections alone.
func (s *stage) connect(ctx context.Context) (*pgx.Conn, error) {
	config := s.admin().Config().ConnConfig.Copy()
	config.User = appRole
	config.RuntimeParams["application_name"] = "chaos hog"
	return pgx.ConnectConfig(ctx, config)
}

// makeClock makes the file that sets the server's clock, in a directory that the server's user can read.
func (s *stage) makeClock() error {
	dir, err := os.MkdirTemp("", "chaos-clock-")
	if err != nil {
		return err
	}
	s.clock = filepath.Join(dir, "clock")
	return errors.Join(os.Chmod(dir, 0o755), s.setClock(0))
}

// setClock sets the server's clock so far ahead of the machine's.
func (s *stage) setClock(ahead time.Duration) error {
	next := s.clock + ".next" // appears as a whole
	if err := os.WriteFile(next, fmt.Appendf(nil, "%+.3f\n", ahead.Seconds()), 0o644); err != nil {
		return err
	}
	return os.Rename(next, s.clock)
}

// heal ends what the network does.
func (s *stage) heal() {
	s.late.Store(0)
	s.lose.Store(0)
	for _, relay := range s.relays {
		_ = relay.Heal() // never fails
	}
}

// close ends all servers and removes what they left.
func (s *stage) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var errs []error
	for _, relay := range s.relays {
		relay.Close()
	}
	if pool := s.admin(); pool != nil {
		pool.Close()
	}
	if s.pooler != nil {
		errs = append(errs, s.pooler.Stop(ctx))
	}
	for _, server := range []*pgserver.Server{s.standby, s.primary} {
		if server != nil {
			errs = append(errs, server.Stop(ctx))
		}
	}
	if s.clock != "" {
		errs = append(errs, os.RemoveAll(filepath.Dir(s.clock)))
	}
	return errors.Join(errs...)
}
