# A JDK and JUnit 4 with a listener that prints tests as Gradle does.
ARG ROOT
FROM ${ROOT}
RUN apt-get update && apt-get install --yes --no-install-recommends default-jdk-headless git junit4 \
    && rm -rf /var/lib/apt/lists/*
ARG PACKAGES
RUN if [ -n "${PACKAGES}" ]; then apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/*; fi
COPY <<'END' /opt/LogRunner.java
import java.io.IOException;
import java.lang.reflect.Modifier;
import java.nio.file.*;
import java.util.*;
import java.util.stream.*;
import org.junit.runner.*;
import org.junit.runner.notification.*;

/** Runs every test class below src/test/java and prints its tests: "Class > method PASSED". */
public class LogRunner extends RunListener {
    private final Set<Description> failed = new HashSet<>();

    public static void main(String[] arguments) throws IOException {
        Path root = Path.of("src/test/java");
        JUnitCore core = new JUnitCore();
        core.addListener(new LogRunner());
        try (Stream<Path> files = Files.walk(root)) {
            Class<?>[] classes = files.map(file -> root.relativize(file).toString())
                .filter(name -> name.endsWith("Test.java") || name.matches("(.*/)?Test[^/]*\\.java"))
                .filter(name -> Files.exists(Path.of("/build", name.replace(".java", ".class")))).sorted()
                .map(name -> load(name.substring(0, name.length() - 5).replace('/', '.')))
                .filter(one -> !Modifier.isAbstract(one.getModifiers())).toArray(Class<?>[]::new);
            System.exit(core.run(classes).wasSuccessful() ? 0 : 1);
        }
    }

    private static Class<?> load(String name) {
        try {
            return Class.forName(name);
        } catch (ClassNotFoundException error) {
            throw new IllegalStateException(error);
        }
    }

    @Override public void testFailure(Failure failure) {
        failed.add(failure.getDescription());
        System.out.println(failure.getTrace().lines().limit(5).map(line -> "> " + line).collect(Collectors.joining("\n")));
    }

    @Override public void testFinished(Description test) {
        String outcome = failed.contains(test) ? "FAILED" : "PASSED";
        System.out.println(test.getClassName() + " > " + test.getMethodName() + " " + outcome);
    }
}
END
RUN javac -d /build -cp '/usr/share/java/*' /opt/LogRunner.java
ARG WORKDIR
COPY repository ${WORKDIR}
WORKDIR ${WORKDIR}
# what Maven's replacer makes of the project's only template
RUN for file in $(find src -name '*.java.in'); do \
    sed "s/@package@/$(dirname ${file#src/main/java/} | tr / .)/; s/@projectversion@/2.0.0/; s/@projectgroupid@/g/; s/@projectartifactid@/a/" \
    $file > ${file%.in}; done
