# The images of hub and agent: `make images`, or `docker build --target krypton-hub .`, with BuildKit, which
# skips the stages that are not needed.

# Source of the files. `built` builds them in containers. `here` uses the archive that `make images` created on this
# machine, and needs no other image.
ARG FILES=built

FROM rust:1.95.0-bookworm AS krypton
WORKDIR /krypton
COPY . .
RUN hack/images/files.sh krypton /bin-of-krypton

FROM golang:1.26.8-bookworm AS helm
WORKDIR /krypton
COPY hack/images hack/images
COPY hack/tools/go.mod hack/tools/go.sum hack/tools/
RUN hack/images/files.sh helm /bin-of-helm

FROM krypton AS built-files
COPY --from=helm /bin-of-helm/helm /bin-of-krypton/
RUN hack/images/files.sh roots /bin-of-krypton /roots

FROM scratch AS built
COPY --from=built-files /roots /

FROM scratch AS here
ADD roots.tar /

FROM ${FILES} AS files

FROM scratch AS base
COPY --from=files /base /
ENV PATH=/usr/local/bin
USER 65532:65532

FROM base AS krypton-agent
ARG VERSION=unversioned
LABEL org.opencontainers.image.title="krypton-agent" \
      org.opencontainers.image.description="Installs the fleet's Helm chart for every Tenant of the cluster it runs in" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=files /krypton-agent /
ENTRYPOINT ["/usr/local/bin/krypton-agent"]

FROM base AS krypton-hub
ARG VERSION=unversioned
LABEL org.opencontainers.image.title="krypton-hub" \
      org.opencontainers.image.description="Keeps one Helm chart installed for every Tenant on every cluster of a fleet" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=files /krypton-hub /
ENTRYPOINT ["/usr/local/bin/krypton-hub"]
