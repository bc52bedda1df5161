package connstring_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/connstring"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// inWords returns the connection string in its other form.
func inWords(c *pgconn.Config) string {
	quote := strings.NewReplacer(`\`, `\\`, `'`, `\'`)
	var words strings.Builder
	for word, value := range map[string]string{"host": c.Host, "user": c.User, "password": c.Password, "dbname": c.Database, "sslmode": "disable"} {
		words.WriteString(word + "='" + quote.Replace(value) + "' ")
	}
	return words.String() + "port=" + strconv.Itoa(int(c.Port))
}

func TestConnectionStringsOfPgxAndLibPQConnect(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	separator := "?"
	if strings.Contains(db.URL, "?") {
		separator = "&"
	}
	words := inWords(&db.Pool.Config().ConnConfig.Config)
	type settings struct{ name, zone string }
	var defaults settings
	const ask = "select current_setting('application_name'), current_setting('timezone')"
	if err := db.Pool.QueryRow(t.Context(), ask).Scan(&defaults.name, &defaults.zone); err != nil {
		t.Fatal(err)
	}
	for connString, want := range map[string]settings{
		db.URL: defaults,
		words:  defaults,
		words + " pool_max_conns=3 default_query_exec_mode=exec statement_cache_capacity=0":                                                           defaults,
		words + " binary_parameters=yes disable_prepared_binary_result=1 load_balance_hosts=random fallback_application_name=shop connect_timeout=10": {"shop", defaults.zone},
		words + " application_name=billing fallback_application_name=shop tz=<+03>-3 sslinline='' hostaddr=''":                                        {"billing", "<+03>-3"},
		db.URL + separator + "binary_parameters=yes&application_name=url":                                                                             {"url", defaults.zone},
	} {
		config, err := connstring.Parse(connString)
		if err != nil {
			t.Errorf("%s: %v", connString, err)
			continue
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		var got settings
		if err := pool.QueryRow(t.Context(), ask).Scan(&got.name, &got.zone); err != nil || got != want {
			t.Errorf("%s: connected with %q, want %q: %v", connString, got, want, err)
		}
		pool.Close()
	}
}

func TestRefusedConnectionStringIsNotRepeated(t *testing.T) {
	t.Parallel()
	const key = "-----BEGIN PRIVATE KEY-----\ngeheim\n-----END PRIVATE KEY-----"
	for connString, says := range map[string]string{
		"postgres://me:ge:heim%zz@h/db":                  "percent-encoded",
		"postgres://me:geheim@h:port/db":                 "is not a PostgreSQL connection string (invalid port)",
		"postgres://h:port/db":                           "(invalid port)",
		"postgres://me:geheim/1@h/db":                    "percent-encoded",
		"Postgres://me:geheim@h/db":                      "it begins with Postgres://: begin it with postgres://, and leave out",
		"localhost/db":                                   "(it neither begins with postgres:// nor is a list such as host=localhost dbname=app)",
		"me:geheim@h:5432/db":                            "neither begins with postgres://",
		"me:geheim@h/db?sslmode=disable":                 "neither begins with postgres://",
		"me:ge=heim@h/db":                                "neither begins with postgres://",
		"app":                                            "neither begins with postgres://",
		"mysql://me:geheim@h/db":                         "is not a PostgreSQL connection string (it begins with mysql://: pgxlock needs PostgreSQL)",
		"jdbc:postgresql://h/db?user=me&password=geheim": "it begins with jdbc:postgresql://: begin it with postgres://, and leave out",
		"jdbc:postgresql:geheim":                         "it begins with jdbc:postgresql:: begin it",
		"postgresql+asyncpg://me:geheim@h/db":            "it begins with postgresql+asyncpg://",
		"host=h password=my geheim":                      "failed to parse as keyword/value",
		"host=h password='geheim":                        "unterminated quoted string",
		"host=h password=geheim port=much":               "invalid port",
		"host=h password=geheim sslmode=perhaps":         "sslmode is invalid",
		"host=h password=geheim sslmode=pqgo-mine":       "sslmode is invalid",
		"host=h password=geheim sslmode=verify-ca sslrootcert=/no/ca.pem":    "/no/ca.pem",
		"host=h password=geheim sslmode=require sslinline=true sslcert=/no":  "both",
		"host=h sslmode=require sslcert='" + key + "' sslkey='" + key + "'":  "failed to configure TLS",
		"host=h password=geheim sslinline=true":                              "has sslinline, which pgxlock does not support: give the certificate and the key as files",
		"host=h password=geheim hostaddr=10.0.0.1":                           "has hostaddr, which pgxlock does not support: give the address as host",
		"postgres://me:geheim@h/db?ssl_min_protocol_version=TLSv1.3":         "has ssl_min_protocol_version",
		"postgres://me:geheim@h/db?ssl_max_protocol_version=TLSv1.2&tz=UTC":  "has ssl_max_protocol_version",
		"postgres://me:geheim@h/db?pool_max_conns=`: geheim&connect_timeout": "is not a PostgreSQL connection string",
	} {
		config, err := connstring.Parse(connString)
		if err == nil || config != nil {
			t.Errorf("%s: accepted", connString)
			continue
		}
		if !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v does not say %q", connString, err, says)
		}
		if strings.Contains(err.Error(), "geheim") || strings.Contains(err.Error(), "heim%") {
			t.Errorf("%s: %v", connString, err)
		}
		if parse, ok := errors.AsType[*pgconn.ParseConfigError](err); ok {
			t.Errorf("the error holds the string: %s", parse.ConnString)
		}
	}
}
