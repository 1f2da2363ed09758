# The environment must be what was asked for, at its own path, with the modules that the original has.
cat > /tmp/build/check.py << 'END'
import platform, sys
prefix, version, modules = sys.argv[1], sys.argv[2], sys.argv[3].split()
if sys.prefix != prefix or platform.python_version() != version:
    sys.exit("this is Python %s at %s, not %s at %s" % (platform.python_version(), sys.prefix, version, prefix))
for module in modules:
    try:
        __import__(module)
    except ImportError as error:
        sys.exit("module %s cannot be imported: %s" % (module, error))
END
"$PYTHON" -E -s /tmp/build/check.py "$ENVIRONMENT" "$PYTHON_VERSION" "$PYTHON_MODULES"
