{{/*
Whether the cluster of this release is the home cluster. If watchCluster.secretName is set, the home cluster is another
one, with a release of this chart with installMode.crdsRbacOnly.
*/}}
{{- define "krypton-hub.isHome" -}}
{{- or .Values.installMode.crdsRbacOnly (not .Values.watchCluster.secretName) }}
{{- end }}

{{/* The hub's namespace on the home cluster, with its objects and the kubeconfig Secrets. */}}
{{- define "krypton-hub.namespace" -}}
{{- default .Release.Namespace .Values.discovery.namespace }}
{{- end }}

{{/* The port for agents, or 0 if it is disabled. */}}
{{- define "krypton-hub.port" -}}
{{- .Values.listen | toString | splitList ":" | last }}
{{- end }}

{{/* Rejects `namespace` if it names another namespace, because all objects are in the release's own. */}}
{{- define "krypton-hub.checkNamespace" -}}
{{- $namespace := default .Release.Namespace .Values.namespace }}
{{- if ne $namespace .Release.Namespace }}
{{- fail (printf "namespace is %s, but the release is in namespace %s; install it with -n %s" $namespace .Release.Namespace $namespace) }}
{{- end }}
{{- end }}

{{/* Whether the values name the image of krypton-operator, under its current or its first name: "true" or empty. */}}
{{- define "krypton-hub.namesOtherImage" -}}
{{- if regexMatch "(krypton|crypto-edge)-operator" (base .Values.image.repository) -}}
true
{{- end }}
{{- end }}

{{/* The image. Only the registry counts if the values name the image of krypton-operator, which knows other flags. */}}
{{- define "krypton-hub.image" -}}
{{- $image := .Values.image }}
{{- if include "krypton-hub.namesOtherImage" . }}
{{- $repository := "krypton-hub" }}
{{- if and (not $image.registry) (contains "/" $image.repository) }}
{{- $repository = printf "%s/krypton-hub" (dir $image.repository) }}
{{- end }}
{{- $image = dict "registry" $image.registry "repository" $repository "tag" "" "digest" "" }}
{{- end }}
{{- include "krypton.image" (dict "Values" (dict "image" $image) "Chart" .Chart) }}
{{- end }}

{{/* Whether image.command starts krypton-operator, which the image doesn't contain: "true" or empty. */}}
{{- define "krypton-hub.namesOtherCommand" -}}
{{- if regexMatch "^/?(krypton|crypto-edge)-operator$" (join " " .Values.image.command) -}}
true
{{- end }}
{{- end }}

{{/* A line for each value of krypton-operator's chart that has another effect here, or none. */}}
{{- define "krypton-hub.notices" -}}
{{- if include "krypton-hub.namesOtherImage" . }}
- image.repository: {{ .Values.image.repository }} is not Krypton's image. The pod uses {{ include "krypton-hub.image" . }}.
{{- end }}
{{- if include "krypton-hub.namesOtherCommand" . }}
- image.command: no effect, because the image starts the hub.
{{- end }}
{{- if .Values.image.args }}
- image.args: replaces the flags of all other values. Use extraArgs to add flags.
{{- end }}
{{- if contains "targetPort: http-status" (toYaml .Values.service.ports) }}
- service.ports: targetPort http-status stands for metrics (8080).
{{- end }}
{{- if contains "port: http-status" (toYaml (list .Values.startupProbe .Values.livenessProbe .Values.readinessProbe)) }}
- livenessProbe, readinessProbe: port http-status stands for health (8081).
{{- end }}
{{- if .Values.ports }}
- ports: no effect. The pod has the ports metrics (8080) and health (8081).
{{- end }}
{{- if (default dict .Values.autoscaling).enabled }}
- autoscaling: no effect, because one hub is the leader. Use replicaCount to add standbys.
{{- end }}
{{- if .Values.multicluster.remoteDeploymentsPollInterval }}
- multicluster.remoteDeploymentsPollInterval: no effect, because the hub watches its members.
{{- end }}
{{- end }}

{{/*
Whether the leader labels its pod and the Service for agents selects that label: "true" or empty. Empty without a port
for agents.
*/}}
{{- define "krypton-hub.labelsLeader" -}}
{{- if and .Values.leaderElection.label (ne (include "krypton-hub.port" .) "0") (not .Values.installMode.crdsRbacOnly) -}}
true
{{- end }}
{{- end }}

{{/*
Rights for the discovery of members in one namespace, or in all ("*"). Empty if discovery needs none there. Another Role
covers labelled Secrets in the hub's namespace.
*/}}
{{- define "krypton-hub.sourceRules" -}}
{{- $discovery := .root.Values.discovery }}
{{- $secrets := false }}
{{- if and (has "kubeconfig" $discovery.providers) (has .namespace (default list $discovery.kubeconfigNamespaces)) }}
{{- $secrets = true }}
{{- end }}
{{- if has .namespace $discovery.deploymentNamespaces }}
{{- $secrets = true }}
{{- end }}
{{- if has .namespace $discovery.clusterNamespaces }}
{{- if .root.Values.multicluster.enabled }}
- {apiGroups: [multicluster.x-k8s.io], resources: [clusterprofiles], verbs: [list, watch]}
{{- end }}
{{- if has "cluster-api" $discovery.providers }}
{{- $secrets = true }}
- {apiGroups: [cluster.x-k8s.io], resources: [clusters], verbs: [list, watch]}
{{- end }}
{{- if has "kamaji" $discovery.providers }}
{{- $secrets = true }}
- {apiGroups: [kamaji.clastix.io], resources: [tenantcontrolplanes], verbs: [list, watch]}
{{- end }}
{{- end }}
{{- if $secrets }}
- {apiGroups: [""], resources: [secrets], verbs: [get, list, watch]}
{{- end }}
{{- end }}

{{/*
Validated provider file of ClusterProfiles. Otherwise, a program that is missing in the pod would cause an error only
with the first profile.
*/}}
{{- define "krypton-hub.providerFile" -}}
{{- $providers := (default dict .Values.multicluster.accessProvidersConfig).providers }}
{{- if not $providers }}
{{- fail "multicluster.enabled needs access providers; set multicluster.accessProvidersConfig.providers" }}
{{- end }}
{{- $folders := list }}
{{- range concat (default list .Values.multicluster.plugins) (default list .Values.extraVolumeMounts) }}
{{- $folders = append $folders (printf "%s/" (trimSuffix "/" .mountPath)) }}
{{- end }}
{{- range $provider := $providers }}
{{- $command := toString (default dict $provider.execConfig).command }}
{{- $there := false }}
{{- range $folders }}
{{- if and (hasPrefix . $command) (not (contains "/../" $command)) }}
{{- $there = true }}
{{- end }}
{{- end }}
{{- if not $there }}
{{- fail (printf "multicluster.accessProvidersConfig: the command %q of access provider %q is not below a mountPath of multicluster.plugins or extraVolumeMounts" $command (toString $provider.name)) }}
{{- end }}
{{- end }}
{{- toPrettyJson .Values.multicluster.accessProvidersConfig }}
{{- end }}

{{- define "krypton-hub.args" -}}
{{- $args := default list .Values.image.args }}
{{- if and .Values.populateArgs (not $args) }}
{{- $args = append $args (printf "--namespace=%s" (include "krypton-hub.namespace" .)) }}
{{- $args = append $args (printf "--watch-namespaces=%s" .Values.operator.watchNamespaces) }}
{{- with .Values.watchCluster }}
{{- if .secretName }}
{{- $args = append $args (printf "--watch-kubeconfig-secret=%s" .secretName) }}
{{- $args = append $args (printf "--watch-kubeconfig-secret-namespace=%s" (default $.Release.Namespace .secretNamespace)) }}
{{- $args = append $args (printf "--watch-kubeconfig-secret-key=%s" .secretKey) }}
{{- end }}
{{- if .context }}
{{- $args = append $args (printf "--watch-context=%s" .context) }}
{{- end }}
{{- if .ensureCrds }}
{{- $args = append $args "--ensure-watch-crds=true" }}
{{- end }}
{{- end }}
{{- $multicluster := .Values.multicluster.enabled }}
{{- with .Values.discovery }}
{{- $providers := .providers }}
{{- if $multicluster }}
{{- $providers = append $providers "cluster-profile" }}
{{- end }}
{{- $args = append $args (printf "--providers=%s" (join "," $providers)) }}
{{- with .kubeconfigNamespaces }}
{{- $args = append $args (printf "--kubeconfig-namespaces=%s" (join "," .)) }}
{{- end }}
{{- if or (has "cluster-api" .providers) (has "kamaji" .providers) $multicluster }}
{{- $args = append $args (printf "--cluster-namespaces=%s" (join "," .clusterNamespaces)) }}
{{- end }}
{{- with .acceptNamespaces }}
{{- $args = append $args (printf "--accept-namespaces=%s" (join "," .)) }}
{{- end }}
{{- if has "kamaji" .providers }}
{{- $args = append $args (printf "--kamaji-kubeconfig-key=%s" .kamajiKubeconfigKey) }}
{{- with .kamajiGenerator }}
{{- $args = append $args (printf "--kamaji-generator=%s" .) }}
{{- end }}
{{- end }}
{{- $prefixes := list }}
{{- range $provider, $prefix := .memberPrefixes }}
{{- $prefixes = append $prefixes (printf "%s=%s" $provider $prefix) }}
{{- end }}
{{- with $prefixes }}
{{- $args = append $args (printf "--member-prefix=%s" (join "," .)) }}
{{- end }}
{{- with .kubeconfigPaths }}
{{- $args = append $args (printf "--kubeconfig-paths=%s" (join "," .)) }}
{{- end }}
{{- end }}
{{- $args = append $args (printf "--kubeconfig-label=%s" .Values.discovery.kubeconfigLabel) }}
{{- $args = append $args (printf "--kubeconfig-key=%s" .Values.discovery.kubeconfigKey) }}
{{- if .Values.multicluster.enabled }}
{{- $args = append $args "--clusterprofile-provider-file=/etc/krypton/access-providers/config.json" }}
{{- end }}
{{- with .Values.multicluster.remoteDeploymentsPollInterval }}
{{- $args = append $args (printf "--remote-deployments-poll-interval=%s" .) }}
{{- end }}
{{- $args = append $args (printf "--self-cluster=%t" .Values.selfCluster) }}
{{- range $flag, $value := dict
  "exec" .Values.insecureKubeconfig.exec
  "auth-provider" .Values.insecureKubeconfig.authProvider
  "token-file" .Values.insecureKubeconfig.tokenFile
  "files" .Values.insecureKubeconfig.files
  "tls" .Values.insecureKubeconfig.tls
  "loopback" .Values.insecureKubeconfig.loopback
  "link-local" .Values.insecureKubeconfig.linkLocal
  "proxy" .Values.insecureKubeconfig.proxy
}}
{{- if $value }}
{{- $args = append $args (printf "--insecure-kubeconfig-%s=true" $flag) }}
{{- end }}
{{- end }}
{{- $args = append $args (printf "--listen=%s" (toString .Values.listen)) }}
{{- with .Values.advertise }}
{{- $args = append $args (printf "--advertise=%s" (join "," .)) }}
{{- end }}
{{- $args = append $args (printf "--proxy-grace=%s" .Values.proxyGrace) }}
{{- with .Values.chart }}
{{- if not .name }}
{{- fail "set chart.repo and chart.name to the Helm chart that Krypton installs for each Tenant" }}
{{- end }}
{{- if not (or .repo (hasSuffix ".tgz" .name) (hasPrefix "oci://" .name)) }}
{{- fail (printf "set chart.repo to the repository of chart %s" .name) }}
{{- end }}
{{- end }}
{{- $args = append $args (printf "--chart-repo=%s" .Values.chart.repo) }}
{{- $args = append $args (printf "--chart-name=%s" .Values.chart.name) }}
{{- $args = append $args (printf "--chart-version=%s" .Values.chart.version) }}
{{- $args = append $args (printf "--chart-install-crds=%t" .Values.chart.installCRDs) }}
{{- $args = append $args "--chart-values-file=/etc/krypton/chart/values.yaml" }}
{{- with .Values.chart.valuesFrom }}
{{- $args = append $args (printf "--chart-values-from=%s" (join "," .)) }}
{{- end }}
{{- with .Values.chart.credentialsSecret }}
{{- $args = append $args (printf "--chart-credentials-secret=%s" .) }}
{{- end }}
{{- if .Values.chart.keyringSecret.name }}
{{- $args = append $args "--chart-keyring=/etc/krypton/keyring/keyring.gpg" }}
{{- end }}
{{- if .Values.tenantValues }}
{{- $args = append $args "--tenant-values=true" }}
{{- end }}
{{- if .Values.placeTenants }}
{{- $args = append $args "--place-tenants=true" }}
{{- end }}
{{- /* YAML reads `off` without quotes as false. */}}
{{- $args = append $args (printf "--drift=%s" (default "off" .Values.drift.mode)) }}
{{- $args = append $args (printf "--drift-interval=%s" .Values.drift.interval) }}
{{- if .Values.lockdown.noCrossNamespaceRefs }}
{{- $args = append $args "--no-cross-namespace-refs=true" }}
{{- end }}
{{- with .Values.lockdown.defaultServiceAccount }}
{{- $args = append $args (printf "--default-service-account=%s" .) }}
{{- end }}
{{- range $flag, $words := dict "workspace-labels" .Values.namespaceConfiguration.labels "workspace-annotations" .Values.namespaceConfiguration.annotations }}
{{- $pairs := list }}
{{- range $key, $value := $words }}
{{- $pairs = append $pairs (printf "%s=%s" $key (toString $value | replace "\\" "\\\\" | replace "," "\\,")) }}
{{- end }}
{{- with $pairs }}
{{- $args = append $args (printf "--%s=%s" $flag (join "," .)) }}
{{- end }}
{{- end }}
{{- if and .Values.selfCluster (include "krypton.helmAccountName" .) }}
{{- $args = append $args (printf "--helm-service-account=%s/%s" (include "krypton.helmAccountNamespace" .) (include "krypton.helmAccountName" .)) }}
{{- end }}
{{- with .Values.helm }}
{{- if not (or (kindIs "string" .retries) (kindIs "invalid" .retries)) }}
{{- $args = append $args (printf "--retries=%d" (int64 .retries)) }}
{{- end }}
{{- $args = append $args (printf "--remediation=%s" .remediation) }}
{{- $args = append $args (printf "--history-max=%d" (int .historyMax)) }}
{{- end }}
{{- with .Values.notify }}
{{- if and .url (not .keySecret.name) }}
{{- fail "notify.url needs a key; set notify.keySecret.name to a Secret with it" }}
{{- end }}
{{- with .url }}
{{- $args = append $args (printf "--notify-url=%s" .) }}
{{- end }}
{{- if .keySecret.name }}
{{- $args = append $args "--notify-key-file=/etc/krypton/notify/key" }}
{{- end }}
{{- end }}
{{- $args = concat $args (include "krypton.commonArgs" . | fromJsonArray) }}
{{- end }}
{{- with concat $args .Values.extraArgs }}
{{- toYaml . }}
{{- end }}
{{- end }}
