# Every target that has a comment behind two hashes is listed by `make help`.

GO   ?= go
LINT  = $(GO) tool -modfile=tools/go.mod

# One server for all packages: chosen, started and stopped by `with`.
WITH  = bin/with --

# What tests use beside PostgreSQL: poolers to run behind, a terminal, a browser, and an extension that reads functions. Where Debian's packages cannot be had these are
# the installed ones, if any.
BESIDE = export PGXLOCK_TEST_PGBOUNCER="$${PGXLOCK_TEST_PGBOUNCER-$$(scripts/pgbouncer-tree)}" \
	PGXLOCK_TEST_TMUX="$${PGXLOCK_TEST_TMUX-$$(scripts/tmux-tree)}" \
	PGXLOCK_TEST_PROMTOOL="$${PGXLOCK_TEST_PROMTOOL-$$(scripts/promtool-tree)}" \
	PGXLOCK_TEST_CHROMIUM="$${PGXLOCK_TEST_CHROMIUM-$$(scripts/chromium-tree)}" \
	PGXLOCK_TEST_PLPGSQL_CHECK="$${PGXLOCK_TEST_PLPGSQL_CHECK-$$(scripts/plpgsql-check-tree)}" \
	PGXLOCK_TEST_GOLANGMIGRATE="$(CURDIR)/bin";

# -count=1 because a server is no cached input. Tests wait for servers and for each other as much as they compute, so
# that more of them run at once than there are processors; with twice as many each takes a tenth more of those.
# make lint vets, test files too.
FLAGS = -count=1 -shuffle=on -parallel 5 -vet=off
RACE  =
# A program with the race detector sleeps for a second before it ends, and the tests start hundreds of them.
export GORACE ?= atexit_sleep_ms=10

# make soak runs this part of its rounds: 1 is all of them.
SOAK ?= 1

# Modules of their own, for what a program that only locks must not depend on.
NESTED = cmd/pgxlock examples/stacks migrations/othertools adapters/golangmigrate adapters/gocron adapters/otel adapters/prometheus bench tools \
	internal/containers cmd/pgxlock/browsertest
NESTED_TESTS = $(NESTED:%=test-in/%)

# These take longest: one that started last would end with a processor idle. Those in the first line mostly wait, while
# the nested modules compute.
LONGEST = ./internal/systemtest ./internal/pgtest ./internal/pgserver ./migrations ./internal/sqltest

.DEFAULT_GOAL := help
.PHONY: help demo golangmigrate test test-main $(NESTED_TESTS) test-race test-integration test-versions soak bench bench-quick bench-growth seed-defects image pictures lint build man clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build ## show locks at work, on a throw-away PostgreSQL (under a minute)
	@bin/with --throw-away -- bin/pgxlock demo

test: build golangmigrate ## run all tests, on a real PostgreSQL (about 4 minutes on 2 cores); of one package with PKG=./migrations
ifdef PKG
	$(BESIDE) $(WITH) $(GO) test $(if $(filter $(PKG:./%=%),$(NESTED)),-C $(PKG) $(FLAGS) $(RACE) ./...,$(FLAGS) $(RACE) -timeout 20m $(PKG))
else
	@$(BESIDE) $(WITH) $(MAKE) --no-print-directory -k -j 2 test-main $(NESTED_TESTS)
endif

# One nested module after the other runs beside the main one. go test prints what a package has to say at once. A
# package more than there are processors, because some only wait at times.
test-main:
	$(GO) test $(FLAGS) $(RACE) -p $$(($$(getconf _NPROCESSORS_ONLN) + 1)) -timeout 20m $(LONGEST) ./...

$(NESTED_TESTS): test-in/%:
	@$(GO) test -C $* $(FLAGS) $(RACE) -timeout 20m ./...

test-race: ## run the same with the race detector, as CI does
	@$(MAKE) --no-print-directory test RACE=-race

test-integration: ## run the main job in a container, through testcontainers-go
	$(GO) build -C internal/containers -o ../../bin/with-containers ./with
	bin/with-containers --container -- $(GO) test $(FLAGS) -race -v -run '^TestIntegration$$' .

soak: build golangmigrate ## run the long tests: many rounds under faults (about 25 minutes); a part of the rounds with SOAK=0.3
	$(BESIDE) PGXLOCK_SOAK='$(SOAK)' $(WITH) $(GO) test $(FLAGS) -race -timeout 60m -run '^TestSoak' ./...
	$(BESIDE) PGXLOCK_SOAK='$(SOAK)' $(WITH) $(GO) test -C cmd/pgxlock $(FLAGS) -race -timeout 60m -run '^TestSoak' ./...

test-versions: golangmigrate ## run what depends on the server on PostgreSQL 15, 17 and 18, from Debian's packages (about 12 minutes)
	$(BESIDE) GO='$(GO)' FLAGS='$(FLAGS)' scripts/test-versions $(VERSIONS)

bench: ## measure what locks cost, as ratios in one run, and write docs/figures.md (about 5 minutes; on a busy machine up to 5 times)
	@$(GO) run -C bench . -runs 5 -write ../docs

bench-quick: ## measure the same against floor, copied SQL and Redis only (under a minute)
	@$(GO) run -C bench . -time 750ms -run '^(advisory|lease)/(floor|seed|redislock|rueidis) (1|32|256)$$'

bench-growth: ## measure how costs grow with callers, processes, rows and waiters, and write docs/sizing.md (about 5 minutes)
	@$(GO) run -C bench . -growth -write ../docs

seed-defects: build ## show what the widespread acquire_lock() gets wrong, beside pgxlock's
	@PGXLOCK_SEED_DEFECTS=table $(WITH) $(GO) test -C internal/sqltest -count=1 -run '^TestSeedDefects$$'

image: ## make a PostgreSQL 15 image from Debian's packages, for an engine without a registry
	scripts/image 15

pictures: ## draw docs/pictures from the source; with TERMINAL=1 also what commands show in a terminal, from real runs
	@$(GO) run -C tools ./pictures ..
ifdef TERMINAL
	@$(MAKE) --no-print-directory build
	@PGXLOCK_TEST_TMUX="$${PGXLOCK_TEST_TMUX-$$(scripts/tmux-tree)}" bin/with --throw-away -- $(GO) run -C tools ./pictures -terminal ..
endif

# What holds the documents without a server: length, links, contents, names of tests and errors, Go that compiles, plain words.
TEXTS = ^Test(TheReadmeIsShort|PagesAreShort|LinksOf|TablesOfContents|IndexLists|TestsThat|EachInvariant|ErrorsHave|TheGoOf|TextsAvoid)

lint: ## gofmt, go vet, golangci-lint, actionlint, shellcheck, and what holds the documents
	@out=$$(gofmt -l .); test -z "$$out" || { echo "gofmt would change:"; echo "$$out"; exit 1; }
	$(GO) vet ./...
	$(LINT) golangci-lint run ./...
	@for m in $(NESTED); do echo "$$m:"; (cd $$m && $(GO) vet ./... && $(GO) tool -modfile=$(CURDIR)/tools/go.mod golangci-lint run ./...) || exit 1; done
	$(GO) test -count=1 -run '$(TEXTS)' ./internal/documents
	$(LINT) actionlint .github/workflows/ci.yml
	@if command -v shellcheck >/dev/null; then shellcheck -x scripts/* .ci/run; \
	else echo "shellcheck is not installed: scripts not checked"; fi

build: ## build bin/pgxlock, the command
	@test -x bin/pgxlock || echo "Building pgxlock; the first time this fetches Go modules ..."
	@$(GO) list -C cmd/pgxlock -deps . >/dev/null 2>&1 || true # fetches without a line for each; the build names what is missing
	@$(GO) build -o bin/ ./internal/pgserver/with
	@$(GO) build -C cmd/pgxlock -o ../../bin/ .

golangmigrate: # golang-migrate's command, and a program that calls its library, for the tests of migrations
	@$(GO) build -C adapters/golangmigrate -o ../../bin/ ./internal/golangmigrate
	@$(GO) build -C adapters/golangmigrate -o ../../bin/ -tags pgx5 github.com/golang-migrate/migrate/v4/cmd/migrate

man: build ## write the command's man pages to bin/man
	@rm -rf bin/man
	@bin/pgxlock man bin/man
	@echo "Written to bin/man; to read one: man -l bin/man/pgxlock-run.1"

clean: ## remove what was built
	rm -rf bin
