"""The tasks: a commit that Debian took from a project's upstream into its package, and how its tests are run.

The base is the release with the patches that come before it in Debian's series; the reference is the commit without its
tests, the hidden tests are the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Project:
    """What the tasks of one source package have in common.

    Attributes:
        language: a Dockerfile in ``dockerfiles``.
        package: Debian's source package.
        version: its version, which ``apt-get source`` gives out.
        parser: of swebench 5, without ``parse_log_``.
        command: runs the tests.
        tests: patterns of the files that are hidden tests, as :func:`fnmatch.fnmatchcase` has them.
        patches: the commits, as the package's series calls them; a task each.
        suite: the release of Debian that the image starts from.
        arguments: of the Dockerfile.
        workdir: where the repository lies inside.
        remove: paths of the image with a copy of the project that has the fix.
    """

    language: str
    package: str
    version: str
    parser: str
    command: str
    tests: tuple[str, ...]
    patches: tuple[str, ...]
    suite: str = "trixie"
    arguments: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/testbed"
    remove: tuple[str, ...] = ()


_GO = "/go/src"
_JUNIT = """\
libraries='/build:src/main/resources:src/test/resources:/usr/share/java/*'
javac -nowarn -d /build -cp "$libraries" $(find src -name '*.java') && java -cp "$libraries" LogRunner"""

PROJECTS = (
    Project(
        "go", "golang-github-gin-gonic-gin", "1.8.1-3", "gotest", "go test -v ./...", ("*_test.go",),
        (
            "0005-fix-lack-of-escaping-filename-in-content-disposition.patch",
            "0006-add-escape-logic-for-header.patch",
        ),
        arguments={
            "PACKAGES": "golang-github-gin-contrib-sse-dev golang-github-go-playground-validator-v10-dev "
            "golang-github-mattn-go-isatty-dev golang-github-pelletier-go-toml.v2-dev "
            "golang-github-stretchr-testify-dev golang-github-ugorji-go-codec-dev golang-golang-x-net-dev "
            "golang-gopkg-yaml.v2-dev golang-google-protobuf-dev tzdata",
        },
        workdir=f"{_GO}/github.com/gin-gonic/gin",
    ),
    Project(
        "go", "golang-golang-x-net", "1:0.27.0-2", "gotest", "go test -v ./html ./html/atom", ("*_test.go",),
        ("0003-html-properly-handle-trailing-solidus-in-unquoted-at.patch",),
        workdir=f"{_GO}/golang.org/x/net",
    ),
    Project(
        "javascript", "node-tar", "6.2.1+~cs7.0.8-1+deb13u1", "tap",
        "set -o pipefail; tap --no-coverage --no-timeout -R tap test/unpack.js test/normalize-unicode.js "
        "test/path-reservations.js test/ghsa* | sed -E 's/ # time=.*//'",
        ("test/*", "tap-snapshots/*"),
        ("CVE-2026-23745.patch", "CVE-2026-23950.patch"),
        arguments={
            "PACKAGES": "tap@16.3.9 chownr@2.0.0 end-of-stream@1.4.4 events-to-array@2.0.3 fs-minipass@2.1.0 "
            "minipass@5.0.0 minizlib@2.1.2 mkdirp@1.0.4 mutate-fs@2.1.1 nock@13.5.4 rimraf@3.0.2 yallist@4.0.0"
        },
        workdir="/srv/testbed",
        remove=("/usr/share/nodejs/tar",),  # of Debian's npm
    ),
    Project(
        "javascript", "node-tmp", "0.2.2+dfsg+~0.2.3-1.1~deb13u1", "tap",
        "mocha -t 20000 -R tap $(ls test/*-test.js | grep -v issue121)",
        ("test/*",), ("0002-Fix-use-of-tmp.dir-with-dir-option.patch",),
        arguments={"PACKAGES": "mocha@10.4.0 rimraf@3.0.2"}, workdir="/srv/testbed",
    ),
    Project(
        "java", "jackson-core", "2.14.1-2~deb13u1", "gradle_custom", _JUNIT, ("src/test/*",),
        ("CVE-2025-52999.patch",), arguments={"PACKAGES": "junit5"},
    ),
    Project(
        "java", "jackson-dataformat-smile", "2.7.8-5+deb13u1", "gradle_custom", _JUNIT, ("src/test/*",),
        ("CVE-2025-52999.patch",),
        arguments={"PACKAGES": "libjackson2-annotations-java libjackson2-core-java libjackson2-databind-java"},
    ),
    Project(
        "php", "php-guzzlehttp-psr7", "2.7.1-1+deb13u2", "phpunit",
        "phpunit --testdox --bootstrap vendor/autoload.php tests",
        ("tests/*",),
        (
            "0004-2.8-Encode-plus-sign-in-withQueryValue-and-withQuery.patch",
            "0007-Reject-malformed-Host-authorities-717.patch",
        ),
        arguments={
            "PACKAGES": "php-getallheaders php-http-interop-http-factory-tests php-psr-http-factory "
            "php-psr-http-message",
            "LIBRARIES": "Psr/Http/Message",
        },
    ),
    Project(
        "php", "php-league-commonmark", "2.7.0-1+deb13u1", "phpunit",
        "phpunit --testdox --no-coverage tests/unit/Extension/Embed",
        ("tests/*",),
        ("0007-Fix-DomainFilteringAdapter-hostname-boundary-bypass.patch",),
        arguments={
            "PACKAGES": "php-embed php-league-config php-nyholm-psr7 php-psr-event-dispatcher "
            "php-symfony-deprecation-contracts php-symfony-finder php-symfony-yaml php-yaml",
            "LIBRARIES": "League/Config Psr/EventDispatcher",
        },
    ),
    Project(
        "c", "opencc", "1.1.9+ds1-1+deb13u1", "googletest",
        "cmake --build /build --target ConversionTest MaxMatchSegmentationTest "
        "&& ctest --test-dir /build -V -R 'Conversion|MaxMatch'",
        ("*Test.cpp",), ("0001-Fix-two-out-of-bounds-read-issues-when-handling-trun.patch",),
        arguments={
            "PACKAGES": "darts googletest libmarisa-dev libtclap-dev python3 rapidjson-dev",
            "OPTIONS": "-DENABLE_GTEST=ON -DUSE_SYSTEM_DARTS=ON -DUSE_SYSTEM_GTEST=ON -DUSE_SYSTEM_MARISA=ON "
            "-DUSE_SYSTEM_RAPIDJSON=ON -DUSE_SYSTEM_TCLAP=ON",
        },
    ),
    Project(
        "c", "cjson", "1.7.18-3.1+deb13u1", "jq",
        r"set -o pipefail; cmake --build /build && ctest --test-dir /build -V "
        r"| sed -E 's/^[0-9]+: .*:([a-z_0-9]+):(PASS|FAIL).*/\2: \1/'",
        ("tests/*",), ("0001-allocate-memory-for-the-temporary-buffer.patch",),
        arguments={"OPTIONS": "-DENABLE_CJSON_UTILS=On"},
    ),
    Project(
        "ruby", "puma", "5.6.5-3+deb12u1", "ruby_unit",
        r"set -o pipefail; ruby -Ilib -Itest test/test_puma_server.rb -v "
        r"| sed -E 's/^(.+) = ([0-9.]+) s = (.)$/\1: \3 (\2)/'",
        ("test/*",), ("CVE-2023-40175.patch", "CVE-2024-21647.patch"), suite="bookworm",
        arguments={
            "PACKAGES": "libssl-dev ruby-localhost ruby-minitest ruby-minitest-stub-const ruby-nio4r ruby-rack",
            "BUILD": "cd ext/puma_http11 && ruby extconf.rb && make "
            "&& mkdir -p ../../lib/puma && cp puma_http11.so ../../lib/puma/",
        },
    ),
)  # fmt: skip
