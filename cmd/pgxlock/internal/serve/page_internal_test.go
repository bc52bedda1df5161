package serve

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// rendered is the part of a page that changes.
func rendered(t *testing.T, p page) string {
	t.Helper()
	if p.Graph == nil {
		p.Graph = &drawing{}
	}
	var html bytes.Buffer
	if err := pages.ExecuteTemplate(&html, "live", p); err != nil {
		t.Fatal(err)
	}
	return html.String()
}

// An empty column would take the room that the names of holders need.
func TestColumnThatIsEmptyIsNotShown(t *testing.T) {
	t.Parallel()
	waiters := func(rows ...waiterRow) page { return page{Waiters: table[waiterRow]{Rows: rows, All: len(rows)}} }
	holders := func(rows ...holderRow) page { return page{Holders: table[holderRow]{Rows: rows, All: len(rows)}} }
	expired := func(rows ...holderRow) page { return page{Expired: table[holderRow]{Rows: rows, All: len(rows)}} }
	for _, test := range []struct {
		title       string
		empty, full page
	}{
		{"Behind it", waiters(waiterRow{}, waiterRow{}), waiters(waiterRow{}, waiterRow{Behind: 1})},
		{"Process", waiters(waiterRow{}), waiters(waiterRow{}, waiterRow{PID: "1"})},
		{"Waiting", holders(holderRow{}), holders(holderRow{Waiting: "1"})},
		{"Token", holders(holderRow{}), holders(holderRow{Token: "1"}, holderRow{})},
		{"Metadata", holders(holderRow{}), holders(holderRow{Metadata: "m"})},
		{"Client", holders(holderRow{}), holders(holderRow{Client: "c"})},
		{"Process", holders(holderRow{}), holders(holderRow{PID: "1"})},
		{"Metadata", expired(holderRow{}), expired(holderRow{Metadata: "m"})},
	} {
		empty, full := rendered(t, test.empty), rendered(t, test.full)
		title := ">" + test.title + "</th>"
		if strings.Contains(empty, title) || !strings.Contains(full, title) {
			t.Errorf("%s: empty %t, full %t", test.title, strings.Contains(empty, title), strings.Contains(full, title))
		}
		for _, html := range []string{empty, full} { // a row has as many cells as the head
			head, body, _ := strings.Cut(html, "<tbody>")
			titles, rows := strings.Count(head, "<th scope=\"col\""), strings.Count(body, "<tr")
			if cells := strings.Count(body, "<th scope=\"row\"") + strings.Count(body, "<td"); cells != titles*rows {
				t.Errorf("%s: %d cells in %d rows of %d titles:\n%s", test.title, cells, rows, titles, html)
			}
		}
	}
}

func TestDrawingThatMustBeScrolledSaysSo(t *testing.T) {
	t.Parallel()
	const hint = "scroll the drawing for more"
	for height, want := range map[int]bool{tallest: false, tallest + 1: true} {
		if got := strings.Contains(rendered(t, page{Graph: &drawing{Height: height, Nodes: []box{{}}}}), hint); got != want {
			t.Errorf("height %d says so: %t", height, got)
		}
	}
	css, err := assets.ReadFile("assets/style.css")
	if err != nil || !strings.Contains(string(css), fmt.Sprintf("max-height: %dpx", tallest)) {
		t.Errorf("the style has another height: %v", err)
	}
}

func TestLongNamesKeepTheirEnds(t *testing.T) {
	t.Parallel()
	const long = "tenant:eu-central-1:invoice-export:customer-001"
	for name, want := range map[string]ends{
		"k":                            {"k", ""},
		strings.Repeat("x", 27):        {strings.Repeat("x", 27), ""},
		"ab" + strings.Repeat("世", 30): {"ab" + strings.Repeat("世", 16), strings.Repeat("世", 14)},
		long:                           {long[:len(long)-14], "t:customer-001"},
	} {
		if got := endsOf(name); got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
}
