# Every target that has a comment behind two hashes is listed by `make help`.

GO   ?= go
LINT  = $(GO) tool -modfile=tools/go.mod

# One server for all packages: chosen, started and stopped by `with`.
WITH  = bin/with --

# Long tests look at PGXLOCK_SOAK; -count=1 because a server is no cached input.
TEST  = $(GO) test -count=1 -race -shuffle=on

.DEFAULT_GOAL := help
.PHONY: help demo test test-integration soak seed-defects image lint build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build ## show locks at work, on a throw-away PostgreSQL (under a minute)
	@bin/with --throw-away -- bin/pgxlock demo

test: build ## run all tests, on a real PostgreSQL (under 5 minutes)
	$(WITH) $(TEST) -timeout 10m ./...

test-integration: ## run the main job in a container, through testcontainers-go
	$(TEST) -v -run '^TestIntegration$$' .

soak: build ## run the long tests: many rounds under faults (under 30 minutes)
	PGXLOCK_SOAK=1 $(WITH) $(TEST) -timeout 30m ./...

seed-defects: build ## show what the widespread acquire_lock() gets wrong, beside pgxlock's
	@PGXLOCK_SEED_DEFECTS=table $(WITH) $(GO) test -C internal/sqltest -count=1 -run '^TestSeedDefects$$'

image: ## make a PostgreSQL 15 image from Debian's packages, for an engine without a registry
	scripts/image 15

lint: ## gofmt, go vet, golangci-lint, actionlint, shellcheck
	@out=$$(gofmt -l .); test -z "$$out" || { echo "gofmt would change:"; echo "$$out"; exit 1; }
	$(GO) vet ./...
	$(LINT) golangci-lint run ./...
	$(LINT) actionlint .github/workflows/ci.yml
	@if command -v shellcheck >/dev/null; then shellcheck scripts/install-postgres scripts/image scripts/image-entrypoint.sh .ci/run; \
	else echo "shellcheck is not installed: scripts not checked"; fi

build: ## build bin/pgxlock, the command
	@$(GO) build -o bin/ ./cmd/pgxlock ./internal/pgserver/with

clean: ## remove what was built
	rm -rf bin
