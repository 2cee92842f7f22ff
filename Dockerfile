# pgsieve with Dagster's web interface, traces and Delta's jars, as a user without rights:
#
#   docker build --build-arg VERSION=1.2.3 --tag pgsieve .
#   docker run --volume ./pgsieve:/srv/pgsieve pgsieve run            # ./pgsieve has pgsieve.yaml, and is writable for user 10001
#   docker run --volume ./pgsieve:/srv/pgsieve --publish 9187:9187 pgsieve \
#     run --follow --log-format json --metrics-host 0.0.0.0 --metrics-port 9187
#   docker run --volume ./pgsieve:/srv/pgsieve --publish 3000:3000 pgsieve ui --host 0.0.0.0
FROM python:3.13-slim-bookworm AS build
WORKDIR /build
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
COPY decoding decoding
COPY resources resources
COPY assets assets
COPY pipelines pipelines
# Without it pgsieve --version tells 0.1.0.dev0: the history, which has the tags, is not copied.
ARG VERSION=
ENV SETUPTOOLS_SCM_PRETEND_VERSION_FOR_PGSIEVE=$VERSION
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_BUILD_CONSTRAINT=/build/constraints.txt PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/pgsieve && /opt/pgsieve/bin/pip install --quiet '.[tracing,ui]'

FROM python:3.13-slim-bookworm
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home pgsieve \
    && install --directory --owner pgsieve /srv/pgsieve
COPY --from=build /opt/pgsieve /opt/pgsieve
# Delta's jars, so that a container needs no network but that of its databases and its lake. They are the user's, and where
# they are is kept beside the environment.
RUN chown pgsieve /opt/pgsieve \
    && su pgsieve -c '/opt/pgsieve/bin/python -m pgsieve.resources.lake.jars' \
    && chown root /opt/pgsieve
ENV PATH=/opt/pgsieve/bin:$PATH PYTHONUNBUFFERED=1
# A number: Kubernetes' runAsNonRoot does not look names up.
USER 10001
WORKDIR /srv/pgsieve
EXPOSE 3000 9187
# tini hands SIGTERM on: a follower ends at a commit boundary, Dagster with all its children.
ENTRYPOINT ["tini", "--", "pgsieve"]
CMD ["--help"]
