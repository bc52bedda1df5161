package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/connstring"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/sql"
)

// Defaults for what a connection string, a service file or PG* left open.
const (
	defaultApplicationName = "pgxlock"
	defaultConnectTimeout  = 10 * time.Second
)

// target says which database, and where in it.
type target struct {
	url     string
	schema  string
	flags   *pflag.FlagSet
	stderr  func() io.Writer
	warning sync.Once
}

func (t *target) addFlags(cmd *cobra.Command) {
	t.stderr = cmd.ErrOrStderr
	flags := cmd.Flags()
	t.flags = flags
	flags.StringVar(&t.url, "database-url", "", "connection `string` (default $PGXLOCK_DATABASE_URL, $DATABASE_URL or PG*)")
	flags.StringVar(&t.schema, "schema", "", "`schema` of pgxlock, its owner is trusted (default: the first of the search_path that has it, else the only one)")
}

// use is what a connection is made for.
type use bool

const (
	reading use = false
	writing use = true
)

// connect makes a pool, which connects when it is used first.
func (t *target) connect(ctx context.Context, u use) (*pgxpool.Pool, error) {
	config, err := t.config(u)
	if err != nil {
		return nil, err
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		config.ConnConfig.RuntimeParams["application_name"] = defaultApplicationName
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// config is how to connect. A Locker gives its connections a name of their own, by which others
// know the holder of an advisory lock, unless there is one.
func (t *target) config(u use) (*pgxpool.Config, error) {
	if err := refuseEmpty(t.flags, "the default", "database-url", "schema"); err != nil {
		return nil, err
	}
	if err := place.CheckName(t.schema); err != nil {
		return nil, usageError{fmt.Errorf("--schema %.80q %w", t.schema, err)}
	}
	source, connString := sourceOf(t.url, os.Getenv)
	config, err := parseConfig(source, connString)
	if err != nil {
		return nil, err
	}
	validate := config.ConnConfig.ValidateConnect
	if u == writing {
		validate = dbconn.Primary(validate) // of several hosts
	}
	config.ConnConfig.ValidateConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		if validate != nil {
			if err := validate(ctx, conn); err != nil {
				return err
			}
		}
		if conn.ParameterStatus("is_superuser") == "on" {
			t.warning.Do(func() { t.warn(ctx, conn) })
		}
		return nil
	}
	first := config.ConnConfig.Copy()
	config.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		readAgain(c, first, source, connString)
		return nil
	}
	config.MinConns, config.MinIdleConns = 0, 0 // a command needs no connection before it asks
	return config, nil
}

// readAgain reads the user, the password and the certificates for one more connection: those in a
// passfile, a service file and key files may have been replaced since the first one. The servers and the
// database stay the first ones, because a lock is where it was acquired. What cannot be read
// at this moment, because it is being written, stays as it was first.
func readAgain(c, first *pgx.ConnConfig, source, connString string) {
	config, err := parseConfig(source, connString)
	if err != nil {
		return
	}
	now := config.ConnConfig
	elsewhere := now.Host != first.Host || now.Port != first.Port || now.Database != first.Database || now.Database == "" && now.User != first.User ||
		!slices.EqualFunc(now.Fallbacks, first.Fallbacks, func(a, b *pgconn.FallbackConfig) bool {
			return a.Host == b.Host && a.Port == b.Port && (a.TLSConfig == nil) == (b.TLSConfig == nil)
		})
	if elsewhere || (now.TLSConfig == nil) != (first.TLSConfig == nil) {
		return
	}
	c.User, c.Password, c.TLSConfig, c.Fallbacks = now.User, now.Password, now.TLSConfig, now.Fallbacks
}

// warn says so if a superuser is about to call what belongs to a role that is none. What goes wrong
// here goes wrong again, and is reported, when the command looks for pgxlock.
func (t *target) warn(ctx context.Context, conn *pgconn.PgConn) {
	batch := &pgconn.Batch{}
	batch.ExecParams(statements.ConnReadCommitted.Text(), nil, nil, nil, nil)
	batch.ExecParams(place.LookSQL, [][]byte{[]byte(t.schema)}, nil, nil, nil)
	results, err := conn.ExecBatch(ctx, batch).ReadAll()
	if err != nil || len(results) != 2 {
		return
	}
	found, err := place.Read(func(into ...any) error { return dbconn.ScanRow(pgtype.NewMap(), results[1], into...) })
	if err != nil {
		return
	}
	schema, err := found.Choose(t.schema)
	if err != nil {
		return
	}
	if warning := found.Warning(schema); warning != "" {
		complain(t.stderr(), "warning: "+warning+"; "+place.WarningAdvice)
	}
}

// refuseEmpty refuses flags that were made of a variable which is not set: they
// must not lead to another database, or to more than was meant. otherwise is what
// counts where the flag is left out.
func refuseEmpty(flags *pflag.FlagSet, otherwise string, names ...string) error {
	for _, name := range names {
		if flag := flags.Lookup(name); flag.Changed && strings.Trim(flag.Value.String(), "[]") == "" {
			return usageError{fmt.Errorf("--%s is empty; is the variable set that it was made of? Leave the flag out for %s", name, otherwise)}
		}
	}
	return nil
}

// sourceOf returns the connection string that counts, and who gave it. An empty
// variable is one that is not set.
func sourceOf(flag string, getenv func(string) string) (name, connString string) {
	if flag != "" {
		return "--database-url", flag
	}
	for _, name := range []string{"PGXLOCK_DATABASE_URL", "DATABASE_URL"} {
		if value := getenv(name); value != "" {
			return name, value
		}
	}
	return "PG*", "" // pgx reads them
}

// origin says from where the connection comes, for an error: never what it is.
func origin(flag string, getenv func(string) string) string {
	name, connString := sourceOf(flag, getenv)
	service := getenv("PGSERVICE")
	if u, err := url.Parse(connString); err == nil && u.Query().Get("service") != "" {
		service = u.Query().Get("service")
	}
	var set []string
	for _, variable := range []string{"PGHOST", "PGPORT", "PGUSER", "PGDATABASE"} {
		if connString == "" && getenv(variable) != "" {
			set = append(set, variable)
		}
	}
	if getenv("PGOPTIONS") != "" && !gives(connString, "options") {
		set = append(set, "PGOPTIONS")
	}
	if connString != "" {
		set = append([]string{name}, set...)
	}
	name = strings.Join(set, ", ")
	switch {
	case service != "" && name != "":
		return name + fmt.Sprintf(" and of service %q", service)
	case service != "":
		return fmt.Sprintf("service %q", service)
	case name == "":
		return "the defaults: --database-url, PGXLOCK_DATABASE_URL, DATABASE_URL and PG* name none"
	}
	return name
}

// originOfPassword says from where the password comes, if it is not in the connection string.
func originOfPassword(flag, password string, getenv func(string) string) string {
	_, connString := sourceOf(flag, getenv)
	switch {
	case gives(connString, "password"):
		return ""
	case getenv("PGPASSWORD") == password:
		return "PGPASSWORD"
	}
	return "a service file or a passfile (PGPASSFILE, ~/.pgpass)"
}

// gives reports whether a connection string has a word.
func gives(connString, word string) bool {
	u, err := url.Parse(connString)
	if err != nil || u.Scheme == "" {
		return regexp.MustCompile(`(^|\s)` + word + `\s*=`).MatchString(connString)
	}
	_, has := u.User.Password()
	return has && word == "password" || u.Query().Has(word)
}

// unreadable says which source makes that a connection string cannot be read: it, or a variable that fills in what it leaves open.
func unreadable(source, connString string, err error, getenv func(string) string) error {
	if connString != "" {
		if _, also := connstring.Parse(""); also == nil || also.Error() != err.Error() {
			return fmt.Errorf("%s %w; one looks like postgres://user@host:5432/database", source, err)
		}
	}
	reason := strings.TrimPrefix(err.Error(), "is not a PostgreSQL connection string ")
	for _, variable := range []struct{ name, word string }{
		{"PGPORT", "invalid port"}, {"PGCONNECT_TIMEOUT", "connect_timeout"}, {"PGSSLMODE", "sslmode"}, {"PGTARGETSESSIONATTRS", "target_session_attrs"}, {"PGSERVICE", "service"},
	} {
		if getenv(variable.name) != "" && strings.Contains(reason, variable.word) {
			return fmt.Errorf("%s cannot be used %s; correct it, or unset it", variable.name, reason)
		}
	}
	return fmt.Errorf("the PG* variables name no database that can be used %s; correct them", reason)
}

// parseConfig reads a connection string and fills in our defaults.
func parseConfig(source, connString string) (*pgxpool.Config, error) {
	config, err := connstring.Parse(connString)
	if err != nil {
		return nil, usageError{unreadable(source, connString, err, os.Getenv)}
	}
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = defaultConnectTimeout
	}
	if config.ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement {
		// A command asks once. Behind a pooler what it prepared would stay in a session of
		// others, and the next command would find the name taken.
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	}
	return config, nil
}
