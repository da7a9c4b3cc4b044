{{/* Both charts of Krypton contain an identical copy of this file. */}}

{{- define "krypton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* At most 54 characters, so the name is valid for a Service with the longest suffix, "-metrics". */}}
{{- define "krypton.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 54 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 54 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 54 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "krypton.selectorLabels" -}}
app.kubernetes.io/name: {{ include "krypton.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "krypton.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "krypton.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: krypton
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "krypton.image" -}}
{{- $image := .Values.image }}
{{- $repository := $image.repository }}
{{- if $image.registry }}
{{- $repository = printf "%s/%s" (trimSuffix "/" $image.registry) $image.repository }}
{{- end }}
{{- if $image.digest }}
{{- printf "%s@%s" $repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (default .Chart.AppVersion $image.tag) }}
{{- end }}
{{- end }}

{{/* Krypton's own account, which the pod runs as. */}}
{{- define "krypton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "krypton.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.create is false and serviceAccount.name is empty; set serviceAccount.name to an account other than the namespace's default one" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* The account that Helm uses. If empty, Helm uses Krypton's own account. */}}
{{- define "krypton.helmAccountName" -}}
{{- if .Values.helmRights.create }}
{{- default (printf "%s-helm" (include "krypton.fullname" .)) .Values.helmRights.serviceAccountName }}
{{- else }}
{{- .Values.helmRights.serviceAccountName }}
{{- end }}
{{- end }}

{{- define "krypton.helmAccountNamespace" -}}
{{- default .Release.Namespace .Values.helmRights.serviceAccountNamespace }}
{{- end }}

{{/* Whether an object from `lookup` belongs to this release: "true" or "false". Takes a list: root, object. */}}
{{- define "krypton.belongsToRelease" -}}
{{- $root := index . 0 }}
{{- $annotations := dig "metadata" "annotations" dict (index . 1) | default dict }}
{{- $name := get $annotations "meta.helm.sh/release-name" }}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" }}
{{- and (eq $name $root.Release.Name) (eq $namespace $root.Release.Namespace) }}
{{- end }}

{{/*
Whether this release includes an object that outlives it: a CRD, or namespace krypton-system. "true" or empty. Takes a
dict: root, apiVersion, kind, name, wanted, version (of the schema, or 0).

The release omits an existing object if the object
- belongs to no release or to another one. Otherwise, Helm would reject the installation. Krypton itself creates missing
  objects and updates CRDs;
- has a newer schema. Neither Krypton nor its chart downgrades a CRD.

Helm deletes an object that an upgrade omits, unless it has the annotation helm.sh/resource-policy: keep. An object that
Krypton recreated after a deletion lacks that annotation and the release's. The ClusterRole therefore records the objects
that the release has included. The upgrade includes a recorded object again, or fails.

Without a cluster ("helm template", "--dry-run=client"), `lookup` finds nothing, and the release includes every wanted
object.
*/}}
{{- define "krypton.includes" -}}
{{- $found := lookup .apiVersion .kind "" .name }}
{{- $role := lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" (include "krypton.fullname" .root) }}
{{- $record := dig "metadata" "annotations" "mesh.openkcm.io/release-includes" "" $role | splitList "," }}
{{- $before := and (eq (include "krypton.belongsToRelease" (list .root $role)) "true") (has .name $record) }}
{{- $ours := or $before (eq (include "krypton.belongsToRelease" (list .root $found)) "true") }}
{{- $newer := gt (dig "metadata" "annotations" "mesh.openkcm.io/schema-version" "0" $found | int) (int .version) }}
{{- if and .wanted (or (not $found) (and $ours (not $newer))) -}}
true
{{- else if and $found $before (ne (dig "metadata" "annotations" "helm.sh/resource-policy" "" $found) "keep") }}
{{- fail (printf "this upgrade would delete %s %s with its contents; to keep it, run: kubectl annotate %s %s helm.sh/resource-policy=keep" .kind .name (lower .kind) .name) }}
{{- end }}
{{- end }}

{{- define "krypton.includesCrd" -}}
{{- $version := dig "metadata" "annotations" "mesh.openkcm.io/schema-version" "0" .crd }}
{{- include "krypton.includes" (dict "root" .root "apiVersion" "apiextensions.k8s.io/v1" "kind" "CustomResourceDefinition" "name" .crd.metadata.name "wanted" .wanted "version" $version) }}
{{- end }}

{{- define "krypton.includesNamespace" -}}
{{- $wanted := and .wanted (ne .root.Release.Namespace "krypton-system") }}
{{- include "krypton.includes" (dict "root" .root "apiVersion" "v1" "kind" "Namespace" "name" "krypton-system" "wanted" $wanted "version" 0) }}
{{- end }}

{{/* Names of the included CRDs and namespace, for the record on the ClusterRole. Takes a dict: root, and whether crds
and namespace are wanted. */}}
{{- define "krypton.record" -}}
{{- $root := .root }}
{{- $wanted := .crds }}
{{- $names := list }}
{{- range $path, $_ := $root.Files.Glob "crd-files/*.yaml" }}
{{- $crd := $root.Files.Get $path | fromYaml }}
{{- if include "krypton.includesCrd" (dict "root" $root "crd" $crd "wanted" $wanted) }}
{{- $names = append $names $crd.metadata.name }}
{{- end }}
{{- end }}
{{- if include "krypton.includesNamespace" (dict "root" $root "wanted" .namespace) }}
{{- $names = append $names "krypton-system" }}
{{- end }}
{{- join "," $names }}
{{- end }}

{{/* The CRDs of crd-files/. Uninstalling the release keeps them, because deleting a CRD deletes all its objects. */}}
{{- define "krypton.crds" -}}
{{- range $path, $_ := .Files.Glob "crd-files/*.yaml" }}
{{- $crd := $.Files.Get $path | fromYaml }}
{{- if include "krypton.includesCrd" (dict "root" $ "crd" $crd "wanted" true) }}
{{- $annotations := set ($crd.metadata.annotations | default dict) "helm.sh/resource-policy" "keep" }}
{{- $labels := merge (include "krypton.labels" $ | fromYaml) ($crd.metadata.labels | default dict) }}
{{- $_ := set $crd "metadata" (merge (dict "annotations" $annotations "labels" $labels) $crd.metadata) }}
---
{{ toYaml $crd }}
{{ end }}
{{- end }}
{{- end }}

{{/*
Namespace krypton-system, with Krypton's own objects on the cluster. Krypton creates it if it is missing, but the Role in
it must exist earlier. Uninstalling the release keeps it.
*/}}
{{- define "krypton.systemNamespace" -}}
{{- if include "krypton.includesNamespace" (dict "root" . "wanted" true) }}
---
apiVersion: v1
kind: Namespace
metadata:
  name: krypton-system
  labels:
    {{- include "krypton.labels" . | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
    # In Argo CD, the policy covers the deletion of the Application, but not pruning.
    argocd.argoproj.io/sync-options: Prune=false
    argocd.argoproj.io/compare-options: IgnoreExtraneous
{{ end }}
{{- end }}

{{/* A binding of Krypton's own account. Takes a dict: root, kind, name, namespace. */}}
{{- define "krypton.binding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "krypton.labels" .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ include "krypton.serviceAccountName" .root }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}

{{/*
Rights of Helm. They belong to a separate account, which no pod mounts and only Krypton impersonates.
*/}}
{{- define "krypton.helmRights" -}}
{{- $name := include "krypton.helmAccountName" . }}
{{- $namespace := include "krypton.helmAccountNamespace" . }}
{{- $role := printf "%s-helm" (include "krypton.fullname" .) }}
{{- if .Values.helmRights.create }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  namespace: {{ $namespace }}
  labels:
    {{- include "krypton.labels" . | nindent 4 }}
automountServiceAccountToken: false
{{- if .Values.helmRights.clusterRole }}
---
# Rights that the fleet's chart needs, in every workspace. The name of the binding contains the role, because the role
# of a binding cannot be changed.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $role }}-{{ .Values.helmRights.clusterRole | sha256sum | trunc 8 }}
  labels:
    {{- include "krypton.labels" . | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ .Values.helmRights.clusterRole }}
subjects:
  - kind: ServiceAccount
    name: {{ $name }}
    namespace: {{ $namespace }}
{{- end }}
{{- end }}
{{- if $name }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $role }}
  namespace: {{ $namespace }}
  labels:
    {{- include "krypton.labels" . | nindent 4 }}
rules:
  # Run Helm as this account (--helm-service-account).
  - {apiGroups: [""], resources: [serviceaccounts], resourceNames: [{{ quote $name }}], verbs: [impersonate]}
---
{{ include "krypton.binding" (dict "root" . "kind" "Role" "name" $role "namespace" $namespace) }}
{{ end }}
{{- end }}

{{/*
Rights of the reconciler on its cluster, for the agent and for the hub on the home cluster. They are cluster-wide, because
Tenants and their workspaces can be in any namespace and RBAC cannot restrict a watch to a label.
*/}}
{{- define "krypton.reconcilerRules" -}}
# Watch, create and update the CRD. Server-side apply checks `create` for the name, so this grants no other CRD.
- {apiGroups: [apiextensions.k8s.io], resources: [customresourcedefinitions], resourceNames: [tenants.mesh.openkcm.io], verbs: [get, list, watch, create, patch, update]}
# Watch Tenants, and read a Tenant again before its release is uninstalled.
- {apiGroups: [mesh.openkcm.io], resources: [tenants], verbs: [get, list, watch]}
# Set the finalizer and annotations.
- {apiGroups: [mesh.openkcm.io], resources: [tenants], verbs: [patch]}
# Restore Tenants after their CRD was deleted, unless a Tenant was deleted before its CRD.
- {apiGroups: [mesh.openkcm.io], resources: [tenants], verbs: [create, delete]}
# Update Tenants that the home cluster places here. The rights above create and delete them.
- {apiGroups: [mesh.openkcm.io], resources: [tenants], verbs: [update]}
# Write the status.
- {apiGroups: [mesh.openkcm.io], resources: [tenants/status], verbs: [patch]}
# Watch workspaces. The UID of kube-system identifies the cluster.
- {apiGroups: [""], resources: [namespaces], verbs: [get, list, watch]}
# Create workspaces and krypton-system. Delete a workspace that Krypton created with its last Tenant. Their names
# depend on the Tenants.
- {apiGroups: [""], resources: [namespaces], verbs: [create, delete]}
# Set the fleet's labels and annotations on workspaces that Krypton created.
- {apiGroups: [""], resources: [namespaces], verbs: [patch]}
# Watch the metadata of Helm's release Secrets, and read the newest Secret.
- {apiGroups: [""], resources: [secrets], verbs: [get, list, watch]}
# Unlock a release that a killed Helm process left locked.
- {apiGroups: [""], resources: [secrets], verbs: [update]}
# Check the workloads of a release.
- {apiGroups: [apps], resources: [deployments, statefulsets, daemonsets], verbs: [list, watch]}
# Record events on Tenants.
- {apiGroups: [""], resources: [events], verbs: [create]}
{{- if .Values.tenantServiceAccounts.impersonate }}
# Run Helm as a service account of a Tenant's namespace (spec.serviceAccountName, --default-service-account).
- apiGroups: [""]
  resources: [serviceaccounts]
  {{- with .Values.tenantServiceAccounts.names }}
  resourceNames: {{ toJson . }}
  {{- end }}
  verbs: [impersonate]
{{- end }}
{{- end }}

{{/* Rights of the reconciler in krypton-system. RBAC cannot restrict `create` to a name. */}}
{{- define "krypton.systemRules" -}}
# The Lease of the writer on this cluster.
- {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [krypton-agent], verbs: [get, update]}
- {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create]}
# Secrets with the desired state, with the backup of each Tenant, and with the record of each release. Their names
# depend on Tenant and release.
- {apiGroups: [""], resources: [secrets], verbs: [create, get, update, delete]}
# The anchor, which owns the desired state.
- {apiGroups: [""], resources: [configmaps], resourceNames: [krypton-root-owner], verbs: [get, update]}
- {apiGroups: [""], resources: [configmaps], verbs: [create]}
{{- end }}

{{/* The pod settings that hub and agent share, except containers and volumes. */}}
{{- define "krypton.podSettings" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
serviceAccountName: {{ include "krypton.serviceAccountName" . }}
automountServiceAccountToken: {{ .Values.serviceAccount.automount }}
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .Values.topologySpreadConstraints | nindent 2 }}
{{- else if gt (int .Values.replicaCount) 1 }}
topologySpreadConstraints:
  # Use different nodes if possible.
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "krypton.selectorLabels" . | nindent 8 }}
{{- end }}
{{- with .Values.extraInitContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Probes, resources and security context of the container. */}}
{{- define "krypton.containerSettings" -}}
{{- with .Values.startupProbe }}
startupProbe:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.livenessProbe }}
livenessProbe:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.readinessProbe }}
readinessProbe:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
{{- end }}

{{/* Flags that hub and agent share, as a list in JSON. */}}
{{- define "krypton.commonArgs" -}}
{{- $args := list
  (printf "--helm-timeout=%s" .Values.helm.timeout)
  (printf "--max-concurrent-helm=%d" (int .Values.helm.maxConcurrent))
  (printf "--retry-max=%s" .Values.helm.retryMax)
  (ternary "--metrics-bind-address=:8080" "--metrics-bind-address=0" .Values.metrics.enabled)
  "--health-probe-bind-address=:8081"
  "--private-dir=/run/krypton"
  (printf "--log-format=%s" .Values.logFormat)
}}
{{- with .Values.otlpEndpoint }}
{{- $args = append $args (printf "--otlp-endpoint=%s" .) }}
{{- end }}
{{- toJson $args }}
{{- end }}

{{/* Additional variables. RUST_LOG overrides all other log levels. */}}
{{- define "krypton.moreEnv" -}}
{{- if ne .Values.logLevel "info" }}
- name: RUST_LOG
  value: {{ .Values.logLevel | quote }}
{{- end }}
{{- with .Values.extraEnvs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Ingress of the metrics and of the kubelet's probes. */}}
{{- define "krypton.statusIngress" -}}
{{- if and .Values.metrics.enabled .Values.networkPolicy.metricsFrom }}
# Metrics.
- ports:
    - {protocol: TCP, port: metrics}
  from:
    {{- toYaml .Values.networkPolicy.metricsFrom | nindent 4 }}
{{- end }}
{{- with .Values.networkPolicy.probesFrom }}
# Probes. The pod's own node needs no rule.
- ports:
    - {protocol: TCP, port: health}
  from:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- with .Values.networkPolicy.extraIngress }}
{{ toYaml . }}
{{- end }}
{{- end }}
