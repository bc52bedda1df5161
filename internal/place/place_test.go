package place

import (
	"errors"
	"fmt"
	"testing"
)

// Schemas as look.sql lists them: those on the search_path first.
var (
	stranger = []Owner{{Role: "evil", Object: "function acquire_lock"}}
	first    = Schema{Name: "first", Rank: 1, Version: 8}
	second   = Schema{Name: "second", Rank: 2, Version: 8}
	off      = Schema{Name: "off", Version: 8}
	off2     = Schema{Name: "off2", Version: 8}
	old      = Schema{Name: "old", Rank: 1, Older: true}
	planted  = Schema{Name: "planted", Rank: 1, Owners: stranger}
	planted2 = Schema{Name: "planted2", Owners: stranger}
	oldPlant = Schema{Name: "old plant", Rank: 1, Older: true, Owners: stranger}
	owned    = Schema{Name: "owned", Version: 8, Owners: []Owner{{Role: "owner", Object: "schema ", Trusted: true}}}
)

func TestSchemaIsChosenAmongThoseThatCount(t *testing.T) {
	t.Parallel()
	const refused = "(refused)"
	for name, test := range map[string]struct {
		all            []Schema
		choice, target string
	}{
		"none":                               {nil, refused, ""},
		"the first of the path":              {[]Schema{first, second, off}, "first", "first"},
		"the only one off the path":          {[]Schema{off}, "off", "off"},
		"two off the path":                   {[]Schema{off, off2}, refused, refused},
		"an older one on the path":           {[]Schema{old, off}, refused, "old"},
		"a stranger's before it on the path": {[]Schema{planted, second}, "second", "second"},
		"a stranger's beside it":             {[]Schema{off, planted2}, "off", "off"},
		"a stranger's first on the path":     {[]Schema{planted}, refused, ""}, // the migrations look whose it is
		"a stranger's alone":                 {[]Schema{planted2}, refused, refused},
		"a stranger's older one":             {[]Schema{oldPlant, off}, "off", "off"},
		"a stranger's older one alone":       {[]Schema{oldPlant}, refused, ""},
		"the owner's of the database":        {[]Schema{owned, planted2}, "owned", "owned"},
	} {
		found := Found{Schemas: test.all}
		choice, err := found.Choose("")
		if got := choice.Name; err != nil && test.choice != refused || err == nil && got != test.choice {
			t.Errorf("%s: Choose: %q, %v, want %s", name, got, err, test.choice)
		}
		target, err := found.Target()
		if err != nil && test.target != refused || err == nil && target != test.target {
			t.Errorf("%s: Target: %q, %v, want %q", name, target, err, test.target)
		}
	}
}

func TestErrorNamesFiveOfManySchemas(t *testing.T) {
	t.Parallel()
	var tenants Found
	for i := range 300 {
		tenants.Schemas = append(tenants.Schemas, Schema{Name: fmt.Sprint("tenant", i)})
	}
	_, err := tenants.Choose("")
	const want = `pgxlock is installed in schema "tenant0", "tenant1", "tenant2", "tenant3", "tenant4" and 295 more, and none of them is on the search_path: name one`
	if err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

func TestErrorSaysWhoseTheSchemaIs(t *testing.T) {
	t.Parallel()
	for _, named := range []string{"", "planted2"} {
		_, err := Found{Schemas: []Schema{planted2}}.Choose(named)
		want := UntrustedError{"planted2", stranger[0], named != ""}
		if got, ok := errors.AsType[*UntrustedError](err); !ok || *got != want {
			t.Errorf("%v, want %v", err, &want)
		}
	}
	if _, err := (Found{Schemas: []Schema{oldPlant}}).Choose(""); !errors.Is(err, ErrNone) {
		t.Errorf("a stranger's older function: %v, want ErrNone", err)
	}
}

func TestSchemaThatWasFoundIsFoundAgainOrNone(t *testing.T) {
	t.Parallel()
	found := Found{Schemas: []Schema{first, off, planted2}}
	if got, err := found.Again("off"); err != nil || got.Name != "off" {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := found.Again("dropped"); !errors.Is(err, ErrNone) {
		t.Errorf("%v", err)
	}
	if _, err := found.Again("planted2"); err == nil {
		t.Error("it belongs to a stranger by now")
	}
}

func TestOnlySuperusersAreWarned(t *testing.T) {
	t.Parallel()
	for _, superuser := range []bool{false, true} {
		found := Found{Superuser: superuser}
		if found.Warning(first) != "" || (found.Warning(owned) != "") != superuser {
			t.Errorf("superuser %t: %q, %q", superuser, found.Warning(first), found.Warning(owned))
		}
	}
}
